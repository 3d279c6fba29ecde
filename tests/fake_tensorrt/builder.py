"""Stand-ins for the builder, its config and its profiles, and for the module `tensorrt` itself."""

from __future__ import annotations

from typing import Any

from tests.fake_tensorrt.api import API, ENUMS, Misuse, Stand, Weights, bind
from tests.fake_tensorrt.network import FakeNetwork


class FakeProfile(Stand):
    _cls = "IOptimizationProfile"

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[Any, Any, Any]] = {}

    def _set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        if not all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True)):
            raise Misuse(f"{input}: {min}, {opt}, {max} are not in order")
        self._shapes[input] = tuple(min), tuple(opt), tuple(max)


class FakeTimingCache(Stand):
    _cls = "ITimingCache"

    def __init__(self, held: bytes) -> None:
        self._held = held

    def _serialize(self) -> bytes:
        return self._held + b"+"


class FakeConfig(Stand):
    _cls = "IBuilderConfig"

    def __init__(self) -> None:
        self._flags: list[str] = []
        self._cleared: list[str] = []
        self._features: list[str] = []
        self._profiles: list[FakeProfile] = []
        self._cache: FakeTimingCache | None = None
        self._limits: dict[str, int] = {}

    def _set_flag(self, flag: Any) -> None:
        self._flags.append(ENUMS["BuilderFlag"](flag).name)

    def _clear_flag(self, flag: Any) -> None:
        self._cleared.append(ENUMS["BuilderFlag"](flag).name)

    def _set_preview_feature(self, feature: Any, enable: bool) -> None:
        if enable:
            self._features.append(ENUMS["PreviewFeature"](feature).name)

    def _add_optimization_profile(self, profile: FakeProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def _create_timing_cache(self, serialized_timing_cache: bytes) -> FakeTimingCache:
        return FakeTimingCache(bytes(serialized_timing_cache))

    def _set_timing_cache(self, cache: FakeTimingCache, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return cache._held != b"of another GPU"

    def _get_timing_cache(self) -> FakeTimingCache | None:
        return self._cache

    def _set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._limits[ENUMS["MemoryPoolType"](pool).name] = pool_size


class FakeBuilder(Stand):
    """A Builder whose plan is a line of text, as nothing can be built here. _built: arguments of the last build."""

    _cls = "Builder"
    _built: tuple[FakeNetwork, FakeConfig] | None = None
    _refuses = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bind("Builder", "__init__", args, kwargs)

    def _create_network(self, flags: int = 0) -> FakeNetwork:
        return FakeNetwork(flags)

    def _create_builder_config(self) -> FakeConfig:
        return FakeConfig()

    def _create_optimization_profile(self) -> FakeProfile:
        return FakeProfile()

    def _build_serialized_network(self, network: FakeNetwork, config: FakeConfig) -> bytes | None:
        if self._refuses:
            return None
        network._check()
        if "ALIASED_PLUGIN_IO_10_03" not in config._features and network._aliases():
            raise Misuse("plugins alias their inputs: set PreviewFeature.ALIASED_PLUGIN_IO_10_03")
        for profile in config._profiles:
            for tensor in network._inputs:
                if -1 not in tensor.shape:
                    continue
                if tensor.name not in profile._shapes:
                    raise Misuse(f"a profile lacks {tensor.name}")
                for shape in profile._shapes[tensor.name]:
                    if len(shape) != len(tensor.shape) or any(
                        a not in (b, -1) for a, b in zip(tensor.shape, shape, strict=True)
                    ):
                        raise Misuse(f"{tensor.name} is {tensor.shape}, a profile says {shape}")
            if strange := set(profile._shapes) - {tensor.name for tensor in network._inputs}:
                raise Misuse(f"a profile has {strange}, which are no inputs")
        type(self)._built = network, config
        return b"a plan"


class FakeLogger(Stand):
    _cls = "Logger"
    WARNING = 2

    def __init__(self, *args: Any) -> None:
        pass


class FakeTensorRT:
    """The module `tensorrt`."""

    __version__ = API["version"]
    Weights = Weights
    Builder = FakeBuilder
    Logger = FakeLogger

    def __getattr__(self, name: str) -> Any:
        if name in ENUMS:
            return ENUMS[name]
        raise Misuse(f"the stand-in for tensorrt has no {name}")
