"""Writes a certificate: certificate.json, .csv and .png in its folder, and a copy where searches look for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hwnas.certificate import keep
from hwnas.certificate_plot import certificate_figure
from hwnas.certificate_text import sentences, text_table
from hwnas.certify_estimates import Judged
from hwnas.certify_plan import CertifyPlan
from hwnas.certify_results import Truth, certificate_of
from hwnas.paths import write_atomic
from hwnas.plots import figure_bytes
from hwnas.progress import Console
from hwnas.records import table_csv

if TYPE_CHECKING:
    from hwnas.accuracy.dataset import Dataset
    from hwnas.space import SearchSpace


def write_certificate(plan: CertifyPlan, judged: Sequence[Judged], dataset: Dataset, space: SearchSpace,
                      console: Console) -> None:
    """Everything that a certificate leaves; it is told, and kept for searches where all its trainings are done."""
    truth = Truth(plan, dataset)
    content = certificate_of(truth, judged, dataset, space)
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_atomic(plan.out / "certificate.csv", table_csv(_table(content)))
    write_atomic(plan.out / "certificate.png", figure_bytes(certificate_figure(content), "png"))
    write_atomic(plan.out / "certificate.json", text)
    for line in (*text_table(content), *sentences(content)):
        console.say(line)
    console.say(f"certificate: {plan.out / 'certificate.json'}")
    if not truth.whole:
        console.say(f"{len(truth.done)} of {len(plan.networks) * plan.seeds} trainings are done; searches are told "
                    "once all are.")
        return
    place, put = keep(content, text)
    console.say(f"searches of {space.name} on {dataset.name} will find it: {place}" if put else
                f"searches go on with {place}, which stands on more trainings. Remove it to have them use this one.")


def _table(content: dict[str, Any]) -> list[dict[str, Any]]:
    left_out = ("options", "behind_best")
    return [{"estimator": label, **{key: value for key, value in one.items() if key not in left_out}}
            for label, one in content["estimators"].items()]
