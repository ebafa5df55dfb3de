"""Packs whose experts are made small: scales chosen by a text, if there is one, and the loss measured on another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hotset.errors import HotsetError, ModelError
from hotset.generation.calibration import MAX_TOKENS, TextCalibration
from hotset.generation.text_model import load_tokenizer
from hotset.generation.texts import built_in_text, refuse_shared, text_of_file
from hotset.models.packing import MADE, PackReport, pack, refuse_pack
from hotset.models.quality import measure
from hotset.models.windows import TokenText
from hotset.options import RunOptions
from hotset.options.run import AUTO

QUALITY_TOKENS = 1 << 13
Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None] | None]]
"""Given what is done, a progress callback for the length of a block."""


class PackResult(NamedTuple):
    """A pack, how far it is from its original, and a warning where that is not known."""

    report: PackReport
    quality: dict[str, Any] | None
    warning: str | None = None


@dataclass(frozen=True)
class PackMaker:
    """What to pack and how; `options` say how models run for calibration and for the measuring of quality."""

    model: str
    out: Path
    options: RunOptions
    dtype: str = AUTO
    experts: str = AUTO
    calibrate: Path | None = None
    quality: Path | None = None
    measured: bool = True

    def check(self) -> None:
        """Refuse what does not go together."""
        if self.experts not in MADE and (self.calibrate is not None or self.quality is not None):
            flag = "--calibrate" if self.calibrate is not None else "--quality"
            raise HotsetError(f"{flag} is for experts that are made small: add --experts {', '.join(MADE)}")
        refuse_pack(self.model, Path(self.model), self.experts)
        if self.quality is not None and not self.measured:
            raise HotsetError("--quality FILE and --no-quality exclude each other")
        if self.quality is not None and self.calibrate is not None:
            refuse_shared(self.quality, self.calibrate)

    def make(self, bar: Bar) -> PackResult:
        """Calibrate, pack and measure, each from where an interrupted run has stopped."""
        self.check()
        calibration, text = None, None
        options = replace(self.options, model=self.model, dtype=self.dtype)
        if self.quality is not None:  # read now: a text of no use is found before hours of packing
            text = text_of_file(self.quality, self._tokenizer(), QUALITY_TOKENS)
        if self.calibrate is not None:
            seen = text_of_file(self.calibrate, self._tokenizer(), MAX_TOKENS, whole=True)
            calibration = TextCalibration(self.model, options, seen, partial(bar, "calibrating"))
        with bar("packing") as progress:
            report = pack(
                self.model,
                self.out,
                dtype=self.dtype,
                progress=progress,
                trust_remote_code=options.trust_remote_code,
                experts=self.experts,
                calibration=calibration,
            )
        if self.experts not in MADE or not self.measured:
            return PackResult(report, report.quality)
        return self._with_quality(report, text, options, bar)

    def _with_quality(self, report: PackReport, text: TokenText | None, options: RunOptions, bar: Bar) -> PackResult:
        if text is None and report.quality is not None:
            return PackResult(report, report.quality)
        try:
            text = built_in_text(self._tokenizer()) if text is None else text
        except ModelError as error:
            return PackResult(report, None, f"quality was not measured: {error}")
        known = (report.quality or {}).get("text", {})
        if (known.get("sha256"), known.get("tokens")) == (text.sha256, text.tokens):
            return PackResult(report, report.quality)
        with bar("measuring quality") as progress:
            return PackResult(report, measure(self.model, report.folder, text, options, progress))

    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model, self.options.trust_remote_code)
