"""Step time and memory of transformers, predicted from their shape and layout.

`dtft plan predict` uses this package for the rows of a table of training runs.

* `model`: work and memory of a device, from the model's shape.
* `predict`: seconds of a step by term.
* `table`: reads rows of text as shapes and layouts.
* `fitting`: fits scalars to measured rows, and ranks layouts by predicted seconds.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.transformer.fitting import (
        PredictedLayout,
        PredictionAccuracy,
        ScaleFit,
        concordance,
        fit,
        judge,
        leave_one_out,
        regret,
        search,
    )
    from dtft.planner.transformer.model import ParallelLayout, Shape, memory
    from dtft.planner.transformer.predict import (
        BIGSCIENCE,
        LLM_FOUNDRY_H100,
        SPREADS,
        RowPrediction,
        Scales,
        StepCost,
        elsewhere,
        pool_of,
        predict_table,
        stack,
        step_cost,
    )
    from dtft.planner.transformer.table import Habits, Row, Table

_PUBLIC = {
    "BIGSCIENCE": "predict",
    "Habits": "table",
    "LLM_FOUNDRY_H100": "predict",
    "ParallelLayout": "model",
    "PredictedLayout": "fitting",
    "PredictionAccuracy": "fitting",
    "Row": "table",
    "RowPrediction": "predict",
    "SPREADS": "predict",
    "ScaleFit": "fitting",
    "Scales": "predict",
    "Shape": "model",
    "StepCost": "predict",
    "Table": "table",
    "concordance": "fitting",
    "elsewhere": "predict",
    "fit": "fitting",
    "judge": "fitting",
    "leave_one_out": "fitting",
    "memory": "model",
    "pool_of": "predict",
    "predict_table": "predict",
    "regret": "fitting",
    "search": "fitting",
    "stack": "predict",
    "step_cost": "predict",
}

__all__ = [
    "BIGSCIENCE",
    "Habits",
    "LLM_FOUNDRY_H100",
    "ParallelLayout",
    "PredictedLayout",
    "PredictionAccuracy",
    "Row",
    "RowPrediction",
    "SPREADS",
    "ScaleFit",
    "Scales",
    "Shape",
    "StepCost",
    "Table",
    "concordance",
    "elsewhere",
    "fit",
    "judge",
    "leave_one_out",
    "memory",
    "pool_of",
    "predict_table",
    "regret",
    "search",
    "stack",
    "step_cost",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
