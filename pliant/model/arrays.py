"""The weights of a compiled model, as it reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pliant.runtime.binding import RuntimeModel


class Weights:
    """The arrays that compiled code reads.

    A call uses the arrays of the last `RuntimeModel.set_weights` before it began, until
    it ends; all of them are from one moment.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = list(arrays)

    def serve(
        self,
        runtime: RuntimeModel,
        blocks: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]],
    ) -> None:
        """Keeps the runtime's weights set to what `blocks` makes of the arrays."""
        self._runtime, self._blocks = runtime, blocks
        runtime.set_weights(blocks(self.arrays))

    @property
    def is_following(self) -> bool:
        return False

    def refresh(self, *, always: bool = False) -> None:
        """Makes the arrays again if their sources have changed, or always."""

    def stop(self) -> None:
        """Keeps the arrays as they are."""
