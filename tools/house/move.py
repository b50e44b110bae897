"""Moves and merges modules of dtft, and rewrites every use of them.

    python tools/house/move.py REPO CONFIG.toml [--apply]

Without `--apply` nothing is written: problems and warnings are printed. Run it on a clean tree; afterwards run
`ruff check --fix`, `ruff format`, basedpyright and lint-imports, read what is listed under "prose", and write the
package docstrings. The script is only run once per package; it is not part of the repository.

The config (paths are relative to the config's folder):

    scope = ["dtft.planner"]          # every module in here needs a target, or the script fails
    moves = "planner.csv"             # module,target (as house_moves.csv); a target equal to the module stays
    docs = "docs"                     # docs/<target>.txt: header docstring of a module, or of a package
    only = ["dtft.balance"]           # optional: apply only rows with these prefixes of the target
    quiet = ["dtft.planner.search"]   # modules whose docstring is not kept: the header says it
    [rename]                          # old full name = new name in its target; for clashes and for names too
    "dtft.planner.blocks.find" = "find_repeats"        # general beside those of other modules
    [extract]                         # definitions that go elsewhere than their module (how a circle is loosened)
    "dtft.planner.types" = ["dtft.planner.meshes.AXES"]
    [faces]                           # packages with an __init__ that exports what others use of it
    "dtft.planner.ir" = []            # plus these full (new) names; docs/<package>.txt is its docstring

What it does:
* A module alone in its target moves; several are merged in the order of their imports. The header is docs/<target>.txt;
  what the pieces' docstrings said stands as a comment above each piece, without "Must not know ...". Imports
  are those that are used; TYPE_CHECKING imports stay such. The same constant in two pieces is written once.
* `from old import name` and `from package import old; old.name` follow, at the top of files and in functions, in dtft,
  tests, experiments, benchmarks, configs. Code outside of a package with a face imports from the face (tests: from the
  module). A module used as an object (`old.name`) stays a module import inside its package and in tests if its new
  name is free there; otherwise its names are imported.
* Dotted names and paths in strings, docstrings, comments, doctests, .md, .toml, Makefile follow. Lazy tables
  (`"Name": "module"` in an `__init__`) follow, too.
* Backticked old names of modules in prose are listed, with the file, for you to read.

It stops at: a module without target; two public or private definitions of one name in a target (give a [rename]);
a renamed name that a local variable hides; a name of a face that is also a module of its package; two of one name in a face.
"""

import csv
import re
import subprocess
import sys
import tokenize
import io
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import ast

TOPS = ("dtft", "tests", "experiments", "benchmarks", "configs")
PROBLEMS: list[str] = []
WARNINGS: list[str] = []
PROSE: list[str] = []


def problem(text):
    if text not in PROBLEMS:
        PROBLEMS.append(text)


@dataclass
class Alias:
    """One name that an import binds."""

    stmt: object  # the Import or ImportFrom
    module: str  # from MODULE import name; or import MODULE
    name: str | None
    asname: str | None
    local: str
    tc: bool
    top: bool


@dataclass
class Source:
    """A parsed file."""

    name: str
    path: Path
    data: bytes
    aliases: dict = field(default_factory=dict)  # global local name -> Alias
    all_aliases: list = field(default_factory=list)
    defs: dict = field(default_factory=dict)  # name -> statement
    edits: list = field(default_factory=list)


class Scope:
    """Names that a module, function, class or comprehension binds; imports with their statement."""

    def __init__(self, kind, parent, bindings=()):
        self.kind, self.parent, self.bindings = kind, parent, dict(bindings)

    def resolve(self, name):
        scope, first = self, True
        while scope is not None:
            if name in scope.bindings and (first or scope.kind != "class"):
                return scope
            scope, first = scope.parent, False
        return None


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def bound(body):
    """Names that statements bind in their own scope."""
    found, outer = {}, set()

    def visit(node):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.setdefault(node.name, None)
            for d in node.decorator_list:
                visit(d)
            return
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, COMPREHENSIONS):
            for n in ast.walk(node):
                if isinstance(n, ast.NamedExpr):
                    found.setdefault(n.target.id, None)
            return
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            outer.update(node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.setdefault(node.id, None)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for a in node.names:
                found[a.asname or a.name.split(".")[0]] = node
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.setdefault(node.name, None)
        if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            found.setdefault(node.name, None)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for stmt in body:
        visit(stmt)
    return {n: v for n, v in found.items() if n not in outer}


class File(Source):
    def load(self):
        self.tree = ast.parse(self.data)
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self._parents, self._accesses = {}, []
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
        self._scoped(self.tree, Scope("module", None, bound(self.tree.body)))
        for stmt in self.tree.body:
            for name in defined(stmt):
                self.defs.setdefault(name, stmt)
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(node)
        return self

    def span(self, node):
        if not hasattr(node, "_span"):
            start = self.starts[node.lineno - 1] + node.col_offset
            node._span = start, self.starts[node.end_lineno - 1] + node.end_col_offset
        return node._span

    def attr_span(self, node):
        _, end = self.span(node)
        return end - len(node.attr), end

    def parent(self, node):
        return self._parents.get(node)

    def enclosing(self, node, kinds):
        while node is not None:
            node = self._parents.get(node)
            if isinstance(node, kinds):
                return node
        return None

    def in_tc(self, node):
        n = node
        while (n := self.enclosing(n, ast.If)) is not None:
            if "TYPE_CHECKING" in ast.dump(n.test):
                return True
        return False

    def _scoped(self, node, scope):
        """Notes every Name below a node with its scope."""
        if isinstance(node, ast.Name):
            self._accesses.append((node, scope))
            return
        if isinstance(node, FUNCTIONS):
            args = node.args
            for d in [*args.defaults, *filter(None, args.kw_defaults), *getattr(node, "decorator_list", [])]:
                self._scoped(d, scope)
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])]
            for a in every:
                if a.annotation is not None:
                    self._scoped(a.annotation, scope)
            if getattr(node, "returns", None) is not None:
                self._scoped(node.returns, scope)
            body = node.body if isinstance(node.body, list) else [node.body]
            names = {a.arg: None for a in every} | bound(body)
            inner = Scope("function", scope, names)
            for stmt in body:
                self._scoped(stmt, inner)
            return
        if isinstance(node, ast.ClassDef):
            for d in [*node.bases, *node.keywords, *node.decorator_list]:
                self._scoped(d, scope)
            inner = Scope("class", scope, bound(node.body))
            for stmt in node.body:
                self._scoped(stmt, inner)
            return
        if isinstance(node, COMPREHENSIONS):
            self._scoped(node.generators[0].iter, scope)
            names = {}
            for g in node.generators:
                for n in ast.walk(g.target):
                    if isinstance(n, ast.Name):
                        names[n.id] = None
            inner = Scope("comprehension", scope, names)
            for g in node.generators:
                self._scoped(g.target, inner)
                if g is not node.generators[0]:
                    self._scoped(g.iter, inner)
                for i in g.ifs:
                    self._scoped(i, inner)
            for field_ in ("elt", "key", "value"):
                if getattr(node, field_, None) is not None:
                    self._scoped(getattr(node, field_), inner)
            return
        for child in ast.iter_child_nodes(node):
            self._scoped(child, scope)

    def fix_fstrings(self):
        """Positions of names in f-strings, which Python 3.11 does not always know."""
        by_string = defaultdict(list)
        for node, _ in self._accesses:
            outer = None
            n = node
            while (n := self.enclosing(n, ast.JoinedStr)) is not None:
                outer = n
            if outer is not None:
                by_string[outer].append(node)
        for outer, names in by_string.items():
            a, b = self.span(outer)
            text = self.data[a:b].decode()
            at = {}
            for node in names:
                try:
                    start, end = self.span(node)
                    good = a <= start and end <= b and self.data[start:end].decode() == node.id
                except IndexError:
                    good = False
                spots = [m.start() for m in re.finditer(rf"(?<![\w.]){re.escape(node.id)}\b", text) if in_braces(text, m.start())]
                if not spots:
                    problem(f"{self.name}: {node.id} not found in an f-string")
                    continue
                index = at.get(node.id, 0)
                at[node.id] = index + 1
                spot = a + len(text[: spots[min(index, len(spots) - 1)]].encode())
                node._span = spot, spot + len(node.id.encode())
                # an attribute chain of it ends where its text says
                parent, end = self.parent(node), spot + len(node.id)
                while isinstance(parent, ast.Attribute):
                    end += 1 + len(parent.attr)
                    parent._span = spot, end
                    parent = self.parent(parent)

    def _import(self, node):
        top = self.enclosing(node, (*FUNCTIONS, ast.ClassDef)) is None
        tc = self.in_tc(node)
        if isinstance(node, ast.ImportFrom):
            if node.level or node.names[0].name == "*":
                problem(f"{self.name}: relative or star import")
                return
            for a in node.names:
                self._keep(Alias(node, node.module, a.name, a.asname, a.asname or a.name, tc, top))
        else:
            for a in node.names:
                self._keep(Alias(node, a.name, None, a.asname, a.asname or a.name.split(".")[0], tc, top))

    def _keep(self, alias):
        self.all_aliases.append(alias)
        if alias.top:
            self.aliases.setdefault(alias.local, alias)


def in_braces(text, at):
    depth = 0
    i = 0
    while i < at:
        if text[i] == "{":
            if depth == 0 and text[i : i + 2] == "{{":
                i += 2
                continue
            depth += 1
        elif text[i] == "}" and depth:
            depth -= 1
        i += 1
    return depth > 0


def defined(stmt):
    if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [stmt.name]
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target] if isinstance(stmt, ast.AnnAssign) else []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def is_text(stmt):
    return isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str)


class Move:
    def __init__(self, repo, config_path):
        self.repo = repo
        config = tomllib.loads(config_path.read_text())
        base = config_path.parent
        rows = list(csv.DictReader(open(base / config["moves"])))
        only = tuple(config.get("only", ()))
        self.target, self.order = {}, {}
        known = set()
        for at, row in enumerate(rows):
            known.add(row["module"])
            if row["target"] != row["module"] and not row["target"].startswith("("):
                if not only or under(row["target"], only):
                    self.target[row["module"]] = row["target"]
                    self.order[row["module"]] = at
        self.docs = base / config["docs"]
        self.rename = config.get("rename", {})
        self.quiet = config.get("quiet", ())
        self.extract = {n: t for t, names in config.get("extract", {}).items() for n in names
                        if not only or under(t, only)}
        self.faces = {p: names for p, names in config.get("faces", {}).items()}
        self.files = {}
        for top in TOPS:
            for path in sorted((repo / top).rglob("*.py")):
                name = ".".join(path.relative_to(repo).with_suffix("").parts)
                name = name.removesuffix(".__init__")
                data = path.read_bytes()
                self.files[name] = File(name, path, data)
        for name in self.files:
            file = self.files[name]
            in_scope = any(name == s or name.startswith(s + ".") for s in config["scope"])
            if in_scope and file.path.name != "__init__.py" and name not in known:
                problem(f"{name}: no target in {config['moves']}")
        # A module that stays where others come joins them.
        for name in set(self.target.values()):
            if name in self.files and name not in self.target and self.files[name].path.name != "__init__.py":
                self.target[name] = name
                self.order[name] = -1
        packages = {m.rsplit(".", 1)[0] for m in [*self.target, *(e.rsplit(".", 1)[0] for e in self.extract)]}
        packages |= {f"from {p.rsplit('.', 1)[0]} import {p.rsplit('.', 1)[1]}" for p in packages if "." in p}
        self.loaded = {}
        for name, file in self.files.items():
            if name in self.target or any(p.encode() in file.data for p in packages):
                self.loaded[name] = file.load()
        self.exports = defaultdict(dict)  # package -> name -> module
        for package, names in self.faces.items():
            for full in names:
                self.export(package, *full.rsplit(".", 1))

    # -- where a name is -----------------------------------------------------

    def moved(self, module):
        return module in self.target

    def final(self, module, name):
        """(module, name) where `module.name` is afterwards; None if not moved."""
        full = f"{module}.{name}"
        new = self.rename.get(full, name)
        if full in self.extract:
            return self.extract[full], new
        file = self.loaded.get(module)
        if file is not None and file.path.name != "__init__.py" and name not in file.defs and name in file.aliases:
            alias = file.aliases[name]
            if alias.name is not None and (self.moved(alias.module) or f"{alias.module}.{alias.name}" in self.extract):
                return self.final(alias.module, alias.name)
        if module in self.target:
            return self.target[module], new
        if full in self.rename:
            return module, new
        return None

    def package(self, module):
        return module.rsplit(".", 1)[0]

    def export(self, package, module, name):
        known = self.exports[package].setdefault(name, module)
        if known != module:
            problem(f"face {package}: {name} is in {known} and {module}")

    def place(self, unit, module, name):
        """Where a unit imports a name from."""
        package = self.package(module)
        inside = unit == package or unit.startswith(package + ".")
        if package in self.faces and not inside and not unit.startswith("tests."):
            self.export(package, module, name)
            return package
        return module

    # -- one piece of text ---------------------------------------------------

    def accesses(self, file):
        """(Name, scope) of every name."""
        if not hasattr(file, "fixed"):
            file.fixed = True
            file.fix_fstrings()
        return file._accesses

    def hidden(self, scope, name):
        """Whether a name is bound between a place and the module's globals."""
        found = scope.resolve(name)
        return found is not None and found.kind != "module"

    def owner(self, scope, name):
        """'global', or the local import statement, or None if local."""
        found = scope.resolve(name)
        if found is None or found.kind == "module":
            return "global"
        return found.bindings[name]


def under(name, prefixes):
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@dataclass
class Need:
    """Imports that a unit needs: (module, name, local, tc)."""

    runtime: dict = field(default_factory=dict)
    tc: dict = field(default_factory=dict)

    def add(self, module, name, local, tc):
        (self.tc if tc else self.runtime)[(module, name, local)] = None


def statement(module, name, local, keep_as=False):
    if name is None:
        return f"import {module}" if local in (None, module.split(".")[0]) and local != "as" else f"import {module} as {local}"
    return f"from {module} import {name}" + (f" as {local}" if local != name or keep_as else "")


class Renderer:
    """Text of one unit's piece of one file."""

    def __init__(self, move, file, unit, spans, merged):
        self.move, self.file, self.unit, self.spans, self.merged = move, file, unit, spans, merged
        self.edits = []  # (start, end, bytes)
        self.need = Need()
        self.used_locals = {}  # local -> identity, for clashes in a merged unit

    def inside(self, node):
        start, end = self.file.span(node)
        return any(a <= start and end <= b for a, b in self.spans)

    def edit(self, start, end, text):
        self.edits.append((start, end, text.encode()))

    def run(self):
        m, f = self.move, self.file
        uses = defaultdict(list)  # alias id -> [(node, scope)]
        own = defaultdict(list)
        by_stmt = defaultdict(list)
        for a in f.all_aliases:
            by_stmt[a.stmt].append(a)
        for node, scope in m.accesses(f):
            if not self.inside(node):
                continue
            owner = m.owner(scope, node.id)
            if owner is None:
                continue
            if owner == "global":
                if node.id in f.defs:
                    own[node.id].append((node, scope))
                elif node.id in f.aliases:
                    uses[id(f.aliases[node.id])].append((node, scope))
                continue
            for a in by_stmt[owner]:
                if a.local == node.id:
                    uses[id(a)].append((node, scope))
        self.annotations(uses, own)
        for name, stmt in f.defs.items():
            if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and self.inside(stmt):
                start, _ = f.span(stmt)
                head = re.compile(rb"\b(?:def|class)\s+" + name.encode() + rb"\b").search(f.data, start)
                own[name].append((StringName(head.end() - len(name), name), None))
        for name, found in own.items():
            self.own(name, found)
        for a in f.all_aliases:
            if a.top and self.merged:
                if id(a) in uses:
                    self.alias(a, uses[id(a)])
            elif self.inside(a.stmt):
                self.alias(a, uses.get(id(a), []))
        if not self.merged:
            self.statements(by_stmt)
        else:
            self.statements({s: v for s, v in by_stmt.items() if not v[0].top})
        self.strings()
        return self

    def annotations(self, uses, own):
        """String annotations: their names count as used, and are renamed in place."""
        f, m = self.file, self.move
        roots = []
        for node in ast.walk(f.tree):
            if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
                roots.append(node.annotation)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
                roots.append(node.returns)
        for root in roots:
            for node in strings_of(root):
                if not self.inside(node):
                    continue
                start, end = f.span(node)
                for match in re.finditer(r"(?<![\w.])[A-Za-z_]\w*", f.data[start:end].decode()):
                    name = match.group()
                    fake = StringName(start + match.start(), name)
                    if name in f.defs:
                        own[name].append((fake, None))
                    elif name in f.aliases:
                        uses[id(f.aliases[name])].append((fake, None))

    def place_of(self, node):
        if isinstance(node, StringName):
            return node.start, node.start + len(node.id)
        return self.file.span(node)

    def own(self, name, found):
        m, f = self.move, self.file
        full = (f.name, name)
        final = m.final(*full)
        if final is None:
            return
        module, new = final
        if module != self.unit and not all(isinstance(n, StringName) and s is None and self.is_head(n) for n, s in found):
            self.need.add(m.place(self.unit, module, new), new, new, False)
            self.local(new, final)
        if new != name:
            self.names(found, new)

    def is_head(self, node):
        return self.file.data[: node.start].rstrip().endswith((b"def", b"class"))

    def local(self, name, identity):
        known = self.used_locals.setdefault(name, identity)
        if known != identity:
            problem(f"{self.unit}: {name} is {known} and {identity}")

    def names(self, found, new):
        for node, scope in found:
            if scope is not None and self.move.hidden(scope, new):
                problem(f"{self.file.name}: {new} (was {node.id}) is hidden by a local name")
            self.edit(*self.place_of(node), new)

    def is_free(self, found, new, old):
        """Whether a name can be used where another one was."""
        f = self.file
        if new != old and (new in f.defs or (new in f.aliases and f.aliases[new].local != old)):
            alias = f.aliases.get(new)
            if alias is None or new in f.defs:
                return False
            final = self.move.final(alias.module, alias.name) if alias.name else None
            if final is None or final[1] != new:
                return False
        return not any(s is not None and self.move.hidden(s, new) and new != old for _, s in found)

    def alias(self, a, found):
        """What becomes of one imported name; its import goes to `need`, or `a.lines`."""
        m, f = self.move, self.file
        a.lines = None
        module = None if a.name is None else f"{a.module}.{a.name}"
        if a.name is None:
            if m.moved(a.module):
                problem(f"{f.name}: import {a.module}: use from ... import")
            if self.merged and a.top:
                self.need.add(a.module, None, a.asname or a.module.split(".")[0], a.tc)
            return
        if module in m.target:
            return self.module_alias(a, module, found)
        final = m.final(a.module, a.name)
        if final is None or (final[0] == a.module and final[1] == a.name and not m.moved(a.module)):
            if self.merged and a.top:
                self.need.add(a.module, a.name, a.local, a.tc)
                self.local(a.local, (a.module, a.name))
            return
        target, new = final
        a.lines = []
        if target == self.unit:
            if a.local != new:
                self.names(found, new)
            return
        local = a.asname or new
        if not a.asname and new != a.name and not self.is_free(found, new, a.name):
            local = a.name
        if local != a.local:
            self.names(found, local)
        place = m.place(self.unit, target, new)
        self.bind(a, place, new, local, final)

    def bind(self, a, place, name, local, identity):
        keep = bool(a.asname) and a.asname == a.name == name
        if self.merged and a.top:
            self.need.add(place, name, local, a.tc)
            self.local(local, identity)
        else:
            a.lines.append(statement(place, name, local, keep))

    def module_alias(self, a, module, found):
        m, f = self.move, self.file
        target = m.target[module]
        attributes, bare = [], []
        for node, scope in found:
            parent = f.parent(node) if not isinstance(node, StringName) else None
            if isinstance(parent, ast.Attribute) and parent.value is node:
                attributes.append((parent, node, scope))
            else:
                bare.append(node)
        a.lines = []
        names = {p.attr for p, _, _ in attributes}
        if target == self.unit:
            if bare:
                problem(f"{f.name}: {module} is used as an object in its own target")
            return self.to_names(a, module, attributes)
        package, leaf = target.rsplit(".", 1)
        inside = self.unit == package or self.unit.startswith(package + ".")
        outside = package in m.faces and not inside and not self.unit.startswith("tests.")
        elsewhere = any(m.final(module, n) not in (None, (target, m.final(module, n)[1])) for n in names)
        local = a.asname or leaf
        spots = [(n, s) for _, n, s in attributes]
        free = self.is_free(spots, local, a.local) or a.asname
        clash = any(o is not a and o.local == local and o.top and not (
            o.name and m.target.get(f"{o.module}.{o.name}") == target) for o in f.all_aliases)
        if bare or (not outside and not elsewhere and free and not clash and a.asname is None) or not names:
            if outside:
                WARNINGS.append(f"{self.unit}: imports the module {target} from the inside")
            if not free or clash:
                local = a.local
            for parent, node, scope in attributes:
                start, end = self.place_of(node)
                if local != a.local:
                    self.edit(start, end, local)
                new = m.final(module, parent.attr)[1]
                if new != parent.attr:
                    self.edit(*f.attr_span(parent), new)
            for node in bare:
                if local != a.local:
                    self.edit(*self.place_of(node), local)
            return self.bind(a, package, leaf, local, target)
        self.to_names(a, module, attributes)

    def to_names(self, a, module, attributes):
        m, f = self.move, self.file
        by_name = defaultdict(list)
        for parent, node, scope in attributes:
            by_name[parent.attr].append((parent, scope))
        for name, spots in by_name.items():
            if name == "__name__":
                for parent, _ in spots:
                    self.edit(*f.span(parent), "__name__")
                continue
            final = m.final(module, name)
            target, new = final
            local = new
            if any(m.hidden(s, new) for _, s in spots) or self.taken(new, final):
                if target == self.unit:
                    problem(f"{f.name}: {module.rsplit('.', 1)[-1]}.{name} becomes {new}, which is taken: give it a [rename]")
                    continue
                local = f"{module.rsplit('.', 1)[-1]}_{new}"
                WARNINGS.append(f"{self.unit}: {new} of {target} imported as {local}")
            for parent, _ in spots:
                self.edit(*f.span(parent), local)
            if target != self.unit:
                self.bind(a, m.place(self.unit, target, new), new, local, final)

    def taken(self, name, final):
        f, m = self.file, self.move
        if name in f.defs:
            own = m.final(f.name, name) or (f.name, name)
            return own != final
        if name in f.aliases:
            o = f.aliases[name]
            if o.name is None:
                return True
            return m.final(o.module, o.name) != final and f"{o.module}.{o.name}" not in m.target
        return False

    def statements(self, by_stmt):
        """Import statements that stay where they are, rewritten."""
        f = self.file
        for stmt, aliases in by_stmt.items():
            if not self.inside(stmt) or all(getattr(a, "lines", None) is None for a in aliases):
                continue
            lines = []
            for a in aliases:
                if getattr(a, "lines", None) is None:
                    keep = bool(a.asname) and a.asname == a.name
                    lines.append(statement(a.module, a.name, a.local, keep))
                else:
                    lines += a.lines
            lines = list(dict.fromkeys(lines))
            start, end = f.span(stmt)
            begin = f.data.rfind(b"\n", 0, start) + 1
            indent = f.data[begin:start].decode()
            rest_end = f.data.find(b"\n", end)
            rest = f.data[end:rest_end].decode()
            noqa = "  # noqa: E402" if "noqa: E402" in rest or "noqa: E402" in f.data[start:end].decode() else ""
            if not lines:
                self.edit(begin, rest_end + 1, "")
                continue
            if noqa:  # one statement a module, so that the comment stays on its first line
                grouped = defaultdict(list)
                for line in lines:
                    head, _, name = line.partition(" import ")
                    grouped[head].append(name)
                lines = [
                    f"{h} import {', '.join(n)}{noqa}" if len(f"{h} import {', '.join(n)}{noqa}") <= 88
                    else f"{h} import ({noqa}\n" + "".join(f"    {x},\n" for x in n) + ")"
                    for h, n in grouped.items()]
            text = f"\n{indent}".join(lines)
            self.edit(start, rest_end if noqa else end, text)

    def strings(self):
        """Dotted names and paths in strings and comments."""
        f = self.file
        text = f.data.decode()
        lines = [0]
        for line in text.splitlines(keepends=True):
            lines.append(lines[-1] + len(line.encode()))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (tokenize.STRING, tokenize.COMMENT):
                continue
            row, col = token.start
            start = lines[row - 1] + len(token.line.splitlines(keepends=True)[0][:col].encode()) if token.line else lines[row - 1]
            end = start + len(token.string.encode())
            if not any(a <= start and end <= b for a, b in self.spans):
                continue
            for begin, stop, new in self.move.in_text(token.string, self.file.name, self.unit):
                b0 = start + len(token.string[:begin].encode())
                b1 = start + len(token.string[:stop].encode())
                self.edit(b0, b1, new)

    def text(self, start, end):
        out, at = b"", start
        for a, b, new in sorted({e for e in self.edits if start <= e[0] and e[1] <= end}):
            if a < at:
                problem(f"{self.file.name}: overlapping edits at {self.file.data[a:b]!r}")
                continue
            out += self.file.data[at:a] + new
            at = b
        return (out + self.file.data[at:end]).decode()


@dataclass(frozen=True)
class StringName:
    start: int
    id: str


def strings_of(node):
    """String constants of an annotation, without those of Literal[...]."""
    if isinstance(node, ast.Subscript) and "Literal" in ast.dump(node.value):
        return []
    if isinstance(node, ast.Constant):
        return [node] if isinstance(node.value, str) else []
    return [n for child in ast.iter_child_nodes(node) for n in strings_of(child)]


DOTTED = re.compile(r"\bdtft(?:\.\w+)+")
PATHS = re.compile(r"\b(?:dtft/)?(?:\w+/)+\w+\.py\b")
IMPORT = re.compile(r"from (dtft(?:\.\w+)+) import ([\w, ]+)")
TICKED = re.compile(r"`([a-z_0-9]+)(?:\.(\w+))?`")


def in_text(self, text, where, unit):
    """Edits of a string, comment or document: (start, end, new)."""
    edits, busy = [], []
    for match in IMPORT.finditer(text):
        module, names = match.group(1), [n.strip() for n in match.group(2).split(",")]
        if any(" " in n for n in names):
            continue
        finals = {}
        for n in names:
            if f"{module}.{n}" in self.target:
                package, leaf = self.target[f"{module}.{n}"].rsplit(".", 1)
                finals.setdefault(package, []).append(leaf)
            elif (final := self.final(module, n)) is not None:
                finals.setdefault(final[0], []).append(final[1])
        if not finals:
            continue
        busy.append(match.span())
        if len(finals) > 1:
            problem(f"{where}: {match.group()} in a text becomes several imports")
        ((place, new),) = list(finals.items())[:1]
        edits.append((*match.span(), f"from {place} import {', '.join(new)}"))
    for match in DOTTED.finditer(text):
        if any(a <= match.start() < b for a, b in busy):
            continue
        words = match.group().split(".")
        for size in range(len(words), 1, -1):
            module = ".".join(words[:size])
            if module in self.target:
                rest = words[size:]
                new = self.target[module]
                if rest and (file := self.loaded.get(module)) and rest[0] in file.defs:
                    new, name = self.final(module, rest[0])
                    rest = [name, *rest[1:]]
                made = ".".join([new, *rest])
                if made != match.group():
                    edits.append((*match.span(), made))
                break
    for match in PATHS.finditer(text):
        path = match.group()
        name = path.removesuffix(".py").replace("/", ".")
        module = name if name.startswith("dtft.") else f"dtft.{name}"
        if module in self.target and self.target[module] != module:
            new = self.target[module].replace(".", "/") + ".py"
            edits.append((*match.span(), new if name.startswith("dtft.") else new.removeprefix("dtft/")))
    leaves = {m.rsplit(".", 1)[1]: t for m, t in self.target.items()}
    for match in TICKED.finditer(text):
        leaf = match.group(1)
        if leaf in leaves and leaves[leaf].rsplit(".", 1)[1] != leaf and unit.split(".")[0] != "tests":
            PROSE.append(f"{unit}: {match.group()} -> {leaves[leaf]}")
    return edits


Move.in_text = in_text


def cleaned(doc):
    """A module's docstring without what the import contracts say."""
    doc = re.sub(r"\s*(?:Pure|Deterministic|Arithmetic only|Values only)?[.;:]?\s*(?:[Ii]t )?[Mm]ust\s+not\s+(?:know|import|compile|search)[^.]*(?:\([^)]*\)[^.]*)*\.(?=\s|$)", ".", doc)
    doc = doc.replace("..", ".").replace(" .", ".")
    doc = re.sub(r"(?:(?<=\s)|^)(?:Pure|Pure and deterministic|Values only|Counting only|Arithmetic on \w+|Decides\s+nothing(?: any more| else)?)\.(?=\s|$)", "", doc)
    doc = "\n".join(line.rstrip() for line in doc.strip().splitlines()).strip()
    return doc if doc.endswith(".") else doc + "."


def docstring(file):
    first = file.tree.body[0] if file.tree.body else None
    return first if first is not None and is_text(first) else None


def pieces(move):
    """unit -> [(file, [(start, end)], is_extract)] of everything that moves."""
    found = defaultdict(list)
    for name in {*move.target, *(e.rsplit(".", 1)[0] for e in move.extract)}:
        file = move.loaded[name]
        body = file.tree.body
        data = file.data
        doc = docstring(file)
        # extent of each statement: from the end of the one before it
        extents, at = [], file.span(doc)[1] if doc is not None else 0
        for stmt in body:
            if stmt is doc:
                extents.append(None)
                continue
            end = file.span(stmt)[1]
            eol = data.find(b"\n", end)
            end = len(data) if eol < 0 else eol + 1
            extents.append((at, end))
            at = end
        keep, taken = [], defaultdict(list)
        previous = None
        for stmt, extent in zip(body, extents):
            if extent is None or is_import(stmt, file) or defined(stmt) == ["__all__"]:
                previous = None
                continue
            goes = None
            for n in defined(stmt):
                goes = move.extract.get(f"{name}.{n}", goes)
            if is_text(stmt) and previous is not None:
                goes = previous[0]
            previous = (goes,)
            (keep if goes is None else taken[goes]).append(extent)
        if name in move.target:
            found[move.target[name]].append((file, keep, False))
        else:
            found[name].append((file, None, False))  # stays, less what is extracted
        for unit, spans in taken.items():
            found[unit].append((file, spans, True))
    return found


def is_import(stmt, file):
    if isinstance(stmt, ast.If) and "TYPE_CHECKING" in ast.dump(stmt.test):
        return all(is_import(s, file) for s in stmt.body)
    return isinstance(stmt, (ast.Import, ast.ImportFrom))


def ordered(move, parts):
    """Pieces of a unit: those that others need when they are imported first."""
    names = {file.name: part for part in parts for file in [part[0]] if not part[2]}
    done, out = set(), []

    def visit(name, path=()):
        if name in done:
            return
        if name in path:
            problem(f"import circle in one target: {path}")
            return
        file = names[name][0]
        for a in file.all_aliases:
            if a.top and not a.tc and a.name is not None:
                for other in (a.module, f"{a.module}.{a.name}"):
                    if other in names and other != name:
                        visit(other, (*path, name))
        done.add(name)
        out.append(names[name])

    for name in sorted(names, key=lambda n: move.order.get(n, -1)):
        visit(name)
    extracted = [p for p in parts if p[2]]
    return [*extracted, *out]


def comment(text):
    import textwrap

    lines = []
    for paragraph in text.split("\n\n"):
        if lines:
            lines.append("#")
        if any(line.startswith(("    ", "* ")) for line in paragraph.splitlines()):
            lines += [f"# {line}".rstrip() for line in paragraph.splitlines()]
        else:
            lines += [f"# {line}" for line in textwrap.wrap(" ".join(paragraph.split()), 86)]
    return "\n".join(lines)


def merge(move, unit, parts):
    """The text of a target."""
    bodies, mains, need, locals_ = [], [], Need(), {}
    definitions = {}
    parts = ordered(move, parts)
    many = sum(1 for p in parts if not p[2]) > 1
    header = None
    doc_path = move.docs / f"{unit}.txt"
    if doc_path.exists():
        header = doc_path.read_text().strip()
    for file, spans, is_extract in parts:
        renderer = Renderer(move, file, unit, spans, merged=True).run()
        body, dropped = [], False
        for stmt in file.tree.body:
            start, end = file.span(stmt)
            within = [s for s in spans if s[0] <= start and end <= s[1]]
            if not within:
                continue
            text = renderer.text(*within[0])
            is_main = isinstance(stmt, ast.If) and "__name__" in ast.dump(stmt.test)
            names = [move.final(file.name, n)[1] for n in defined(stmt)]
            same = dropped and is_text(stmt)
            for n in names:
                code = text.strip()
                if n in definitions:
                    if definitions[n][0] == code:
                        same = True
                    else:
                        problem(f"{unit}: {n} is defined by {definitions[n][1]} and {file.name}")
                else:
                    definitions[n] = (code, file.name)
            dropped = same
            if same:
                continue
            (mains if is_main else body).append(text)
        for n, identity in renderer.used_locals.items():
            if locals_.setdefault(n, identity) != identity:
                problem(f"{unit}: imports {n} as {locals_[n]} and {identity}")
        need.runtime |= renderer.need.runtime
        need.tc |= renderer.need.tc
        doc = docstring(file)
        own = ""
        if doc is not None and not is_extract:
            raw = doc.value.value
            for begin, stop, new in sorted(move.in_text(raw, file.name, unit), reverse=True):
                raw = raw[:begin] + new + raw[stop:]
            own = cleaned(raw)
            if not many and header is None:
                header = own
        section = f"\n\n{comment(own)}\n" if many and own and file.name not in move.quiet else "\n\n"
        bodies.append(section + "".join(body).lstrip("\n").join(["\n\n" if many else "", ""]))
    for n in definitions:
        if n in locals_:
            problem(f"{unit}: {n} is imported ({locals_[n]}) and defined by {definitions[n][1]}")
    if header is None:
        WARNINGS.append(f"{unit}: no docs/{unit}.txt")
        header = "TODO"
    tc = {k: None for k in need.tc if k not in need.runtime}
    if tc:
        need.runtime.setdefault(("typing", "TYPE_CHECKING", "TYPE_CHECKING"))
    lines = [statement(*key) for key in need.runtime]
    text = f'"""{header}{chr(10) if chr(10) in header else ""}"""\n\n' + "\n".join(lines) + "\n"
    if tc:
        text += "\nif TYPE_CHECKING:\n" + "\n".join("    " + statement(*key) for key in tc) + "\n"
    return text + "".join(bodies) + "".join(mains)


def face(move, package):
    names = move.exports[package]
    doc = (move.docs / f"{package}.txt")
    if not doc.exists():
        WARNINGS.append(f"{package}: no docs/{package}.txt")
    header = doc.read_text().strip() if doc.exists() else "TODO"
    modules = {Path(t.replace(".", "/")).name for t in move.target.values() if move.package(t) == package}
    for name in names:
        if name in modules:
            problem(f"face {package}: {name} is also a module")
    by_module = sorted(names.items(), key=lambda i: (i[1], i[0]))
    lines = [f"    from {module} import {name}" for name, module in by_module]
    close = "\n" if "\n" in header else ""
    return (f'"""{header}{close}"""\n\nfrom typing import TYPE_CHECKING\n\nfrom dtft._lazy import attributes\n\n'
            + "if TYPE_CHECKING:\n" + "\n".join(lines) + "\n\n_PUBLIC = {\n"
            + "".join(f'    "{n}": "{m.removeprefix(package + ".")}",\n' for n, m in sorted(names.items()))
            + "}\n\n__all__ = [\n" + "".join(f'    "{n}",\n' for n in sorted(names)) + "]\n\n"
            + "__getattr__, __dir__ = attributes(__name__, _PUBLIC)\n")


LAZY = re.compile(r'^(    "\w+": )"([\w.]+)"(,.*)$')


def lazy_tables(move, name, text):
    """Relative modules in `"Name": "module"` tables of an __init__."""
    out = []
    for line in text.splitlines(keepends=True):
        match = LAZY.match(line.rstrip("\n"))
        if match:
            word = re.match(r'\s*"(\w+)"', line).group(1)
            final = move.final(f"{name}.{match.group(2)}", word) if f"{name}.{match.group(2)}" in move.target or f"{name}.{match.group(2)}.{word}" in move.extract else None
            if final:
                place = final[0].removeprefix(name + ".")
                line = f'{match.group(1)}"{place}"{match.group(3)}\n'
        out.append(line)
    return "".join(out)


def main():
    repo, config = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    move = Move(repo, config)
    if PROBLEMS:
        print(*PROBLEMS, sep="\n")
        sys.exit(1)
    writes, deletes = {}, set()
    units = pieces(move)
    for unit, parts in units.items():
        if any(p[1] is None for p in parts):  # a file that stays, less what goes
            (part,) = [p for p in parts if p[1] is None]
            parts = [(part[0], None, False), *[p for p in parts if p[1] is not None]]
            if len(parts) > 1:
                problem(f"{unit}: stays and is a target of [extract]; give it a row in the CSV")
            continue
        writes[unit] = merge(move, unit, parts)
    for name in move.target:
        deletes.add(move.files[name].path)
    ordinary = {}
    for name, file in move.loaded.items():
        if name in move.target:
            continue
        taken = [s for u, parts in units.items() for f, spans, ex in parts if f is file and ex for s in spans]
        renderer = Renderer(move, file, name, [(0, len(file.data))], merged=False)
        if taken:
            spans, at = [], 0
            for a, b in sorted(taken):
                spans.append((at, a))
                at = b
            spans.append((at, len(file.data)))
            renderer.spans = [s for s in spans if s[0] < s[1]]
        renderer.run()
        text = "".join(renderer.text(a, b) for a, b in renderer.spans)
        if taken:
            lines = "\n".join(statement(*k) for k in renderer.need.runtime)
            text = text.replace("\n\nfrom ", f"\n\n{lines}\nfrom ", 1) if lines else text
        if file.path.name == "__init__.py":
            text = lazy_tables(move, name, text)
        if text.encode() != file.data:
            ordinary[file.path] = text
    made = {}
    for package in move.faces:
        if move.exports[package] or (move.docs / f"{package}.txt").exists():
            path = repo / package.replace(".", "/") / "__init__.py"
            if path in ordinary or (path.exists() and path.read_text().strip()):
                WARNINGS.append(f"{package}: has an __init__ already; its face is in {package}.face")
                path = config.parent / f"{package}.face"
            made[path] = face(move, package)
    texts = {}
    for path in sorted(repo.rglob("*")):
        if {".git", ".venv", "results"} & set(path.parts) or not path.is_file():
            continue
        if path.suffix in (".md", ".toml", ".yaml", ".yml", ".txt") or path.name in ("Makefile", "run"):
            text = path.read_text()
            edits = sorted(move.in_text(text, str(path.relative_to(repo)), str(path.relative_to(repo))), reverse=True)
            for a, b, new in edits:
                text = text[:a] + new + text[b:]
            if edits:
                texts[path] = text
    print("== problems", *PROBLEMS, "== warnings", *WARNINGS, "== prose", *sorted(set(PROSE)), sep="\n")
    print("== faces")
    for package, names in move.exports.items():
        print(package, len(names), *sorted(names))
    if PROBLEMS or "--apply" not in sys.argv:
        sys.exit(bool(PROBLEMS))
    for path in deletes:
        path.unlink()
    for unit, text in writes.items():
        path = repo / (unit.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        folder = path.parent
        while folder != repo and not (folder / "__init__.py").exists() and folder.name != "dtft":
            if folder / "__init__.py" not in made:
                (folder / "__init__.py").write_text("")
            folder = folder.parent
    for path, text in {**ordinary, **made, **texts}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "-C", str(repo), "add", "-A"], check=True)


main()
