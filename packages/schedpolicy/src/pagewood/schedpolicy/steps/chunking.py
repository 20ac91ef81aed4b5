"""Prompt chunks as large as a target for the time between tokens allows."""

from collections import deque

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.pages import round_up
from pagewood.schedpolicy.steps.latency import StepModel, StepSample


class DynamicChunk:
    """Sizes the prompt tokens of a step so that the step ends within a target, which is the time between two tokens.

    Next to many or long decodes, prompts get fewer tokens; on an idle engine they get more. The step model is fitted
    again at intervals to the latest measured steps.

    Invariant: `min_tokens <= tokens(...) <= max_tokens`, both whole pages; `min_tokens` is granted even if it takes
    longer than the target, so that prompts make progress.
    """

    __slots__ = ("_num_new", "_page_size", "_samples", "max_tokens", "min_tokens", "model", "refit_every", "target_s")

    def __init__(
        self,
        model: StepModel,
        *,
        target_s: float,
        max_tokens: int,
        min_tokens: int = 16,
        page_size: int = 1,
        window: int = 512,
        refit_every: int = 64,
    ) -> None:
        """Start with an initial model.

        Args:
            model: Step model to use before the first fit.
            target_s: Longest duration of a step, > 0.
            max_tokens: Most prompt tokens of a step, >= min_tokens.
            min_tokens: Fewest prompt tokens of a step, >= 1.
            page_size: Tokens of a page, >= 1; sizes are rounded down to whole pages, `min_tokens` up.
            window: Number of latest steps that the model is fitted to, >= refit_every.
            refit_every: Number of steps from one fit to the next, >= 1.

        Raises:
            ValueError: An argument is out of range.
        """
        require_real("target_s", target_s)
        if not target_s > 0:
            raise ValueError(f"target_s must be > 0, got {target_s}")
        require_count("page_size", page_size, least=1)
        require_count("min_tokens", min_tokens, least=1)
        require_count("max_tokens", max_tokens)
        require_count("window", window)
        if not 1 <= require_count("refit_every", refit_every) <= window:
            raise ValueError(f"refit_every must be in [1, window ({window})], got {refit_every}")
        self.min_tokens = round_up(min_tokens, page_size)
        self.max_tokens = max_tokens // page_size * page_size
        if self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens must be >= min_tokens ({self.min_tokens}) in whole pages, got {max_tokens}")
        self.target_s = target_s
        self._page_size = page_size
        self.refit_every = refit_every
        self.model = model  # written by: observe
        self._samples: deque[StepSample] = deque(maxlen=window)  # written by: observe
        self._num_new = 0  # samples since the last fit; written by: observe

    def tokens(self, *, num_decode: int, num_kv: int) -> int:
        """Return how many prompt tokens a step may compute next to decodes that read `num_kv` tokens of KV."""
        num_tokens = self.model.chunk_tokens(self.target_s, num_decode=num_decode, num_kv=num_kv)
        return min(self.max_tokens, max(self.min_tokens, num_tokens // self._page_size * self._page_size))

    def observe(self, sample: StepSample) -> None:
        """Record a measured step, and fit the model again every `refit_every` steps.

        If the samples do not determine `prefill_s`, the model stays as it is.
        """
        self._samples.append(sample)
        self._num_new += 1
        if self._num_new >= self.refit_every:
            self._num_new = 0
            try:
                self.model = StepModel.fitted(self._samples)
            except ValueError:
                return
