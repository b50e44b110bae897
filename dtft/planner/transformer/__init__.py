"""Step time and memory of transformers, predicted from their shape and layout.

`dtft plan predict` uses this package for the rows of a table of training runs.

* `model`: the shape of a transformer and its layout. `program`: its step in JAX.
* `predict`: predicts the seconds of the program, part by part, and its memory.
* `table`: reads rows of text as shapes and layouts.
* `fitting`: fits factors on predicted seconds to measured rows, and ranks layouts by
  predicted seconds.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.transformer.fitting import (
        IntervalCoverage,
        PredictedLayout,
        PredictionAccuracy,
        ScaleFit,
        UnseenRows,
        accuracy_from,
        concordance,
        coverage,
        fit,
        judge,
        leave_one_out,
        regret,
        search,
    )
    from dtft.planner.transformer.model import ParallelLayout, Shape
    from dtft.planner.transformer.predict import (
        A100_SCALES,
        H100_SCALES,
        SPREADS,
        RowPrediction,
        accuracy_of,
        elsewhere,
        memory,
        pool_of,
        predict_row,
        predict_table,
        scales_of,
        step_cost,
    )
    from dtft.planner.transformer.program import workload_of
    from dtft.planner.transformer.table import Habits, Row, Table

_PUBLIC = {
    "A100_SCALES": "predict",
    "H100_SCALES": "predict",
    "Habits": "table",
    "IntervalCoverage": "fitting",
    "ParallelLayout": "model",
    "PredictedLayout": "fitting",
    "PredictionAccuracy": "fitting",
    "Row": "table",
    "RowPrediction": "predict",
    "SPREADS": "predict",
    "ScaleFit": "fitting",
    "Shape": "model",
    "Table": "table",
    "UnseenRows": "fitting",
    "accuracy_from": "fitting",
    "accuracy_of": "predict",
    "concordance": "fitting",
    "coverage": "fitting",
    "elsewhere": "predict",
    "fit": "fitting",
    "judge": "fitting",
    "leave_one_out": "fitting",
    "memory": "predict",
    "pool_of": "predict",
    "predict_row": "predict",
    "predict_table": "predict",
    "regret": "fitting",
    "scales_of": "predict",
    "search": "fitting",
    "step_cost": "predict",
    "workload_of": "program",
}

__all__ = [
    "A100_SCALES",
    "H100_SCALES",
    "Habits",
    "IntervalCoverage",
    "ParallelLayout",
    "PredictedLayout",
    "PredictionAccuracy",
    "Row",
    "RowPrediction",
    "SPREADS",
    "ScaleFit",
    "Shape",
    "Table",
    "UnseenRows",
    "accuracy_from",
    "accuracy_of",
    "concordance",
    "coverage",
    "elsewhere",
    "fit",
    "judge",
    "leave_one_out",
    "memory",
    "pool_of",
    "predict_row",
    "predict_table",
    "regret",
    "scales_of",
    "search",
    "step_cost",
    "workload_of",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
