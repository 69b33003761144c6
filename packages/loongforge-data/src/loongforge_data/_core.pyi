from collections.abc import Sequence

from typing_extensions import Buffer

VERSION: str

def vector_kernels() -> str: ...

class FrameConverter:
    def __new__(
        cls,
        *,
        width: int,
        height: int,
        depth: int,
        chroma_shift: tuple[int, int] | None,
        matrix: str,
        full_range: bool,
        rotation: int = 0,
        crop: tuple[int, int, int, int] | None = None,
        size: tuple[int, int] | None = None,
        vector: bool = True,
    ) -> FrameConverter: ...
    @property
    def output_size(self) -> tuple[int, int]: ...
    def run(
        self, planes: Sequence[Buffer], strides: Sequence[int], out: Buffer, offset: int = 0
    ) -> None: ...
