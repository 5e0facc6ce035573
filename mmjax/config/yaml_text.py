"""Settings as YAML and back, typed by its dataclasses, so that no value is taken for something else in silence."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import yaml

from mmjax.config.fault import ConfigurationFaults, Fault
from mmjax.config.settings import RunConfig
from mmjax.errors import ConfigurationError

Settings = typing.TypeVar("Settings")

_LARGEST_FILE_CHARACTERS = 1_000_000
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ["str", "int", "float", "bool", "null", "map", "seq", "timestamp"]
}


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted name, in the order of the dataclasses."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, config)):
        value = getattr(config, field.name)
        flat |= (
            flatten(value, f"{prefix}{field.name}.")
            if dataclasses.is_dataclass(value)
            else {prefix + field.name: value}
        )
    return flat


class _Dumper(yaml.SafeDumper):
    """Writes a tuple as a list on one line."""


_Dumper.add_representer(
    tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", list(value), flow_style=True)
)


def to_yaml(config: object) -> str:
    """YAML that `settings_from_yaml` reads back as an equal dataclass."""
    return yaml.dump(
        dataclasses.asdict(typing.cast(Any, config)), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True
    )


def from_yaml(text: str, file: str) -> RunConfig:
    """`settings_from_yaml` of a RunConfig."""
    return settings_from_yaml(text, file, RunConfig)


def settings_from_yaml(text: str, file: str, kind: type[Settings]) -> Settings:
    """Read a dataclass of settings; those that are not there keep their defaults.

    `file` is how messages call the text.

    Raises:
      ConfigurationError: not YAML, or not one mapping.
      ConfigurationFaults: all unknown or repeated names and values of a wrong type, each with its line.
    """
    try:
        if len(text) > _LARGEST_FILE_CHARACTERS:
            raise yaml.YAMLError(f"{len(text)} characters, which no configuration has")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigurationError(
            file,
            found=f"text that is not YAML ({reason})",
            expected="a configuration as `config.yaml` of a run",
            remedy="mend it",
        ) from error
    faults: list[Fault] = []
    config = _read(root, kind, "", faults) if root is not None else kind()
    if faults:
        raise ConfigurationFaults(file, faults)
    return config


def settings_with(config: Settings, changes: Mapping[str, Any], file: str) -> Settings:
    """`config` with plain values in place of those settings, each by its dotted name.

    `file` is how messages call where they come from.

    Raises:
      ConfigurationFaults: unknown names and values of a wrong type.
    """
    values = dataclasses.asdict(typing.cast(Any, config))
    for name, value in changes.items():
        *words, last = name.split(".")
        parent = values
        for word in words:
            parent = parent.setdefault(word, {})
        parent[last] = value
    text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return settings_from_yaml(text, file, type(config))


def _read(node: yaml.Node, kind: Any, path: str, faults: list[Fault]) -> Any:
    """The value of `node` as type `kind`; what is wrong is added to `faults`."""

    def fault(expected: str) -> None:
        found = repr(node.value[:80]) if isinstance(node, yaml.ScalarNode) else "several values"
        line = f"line {node.start_mark.line + 1}: " if node.start_mark else ""
        faults.append(Fault(path=path or "(whole file)", found=line + found, remedy=f"give {expected}"))

    if node.tag not in _PLAIN_TAGS:
        return fault(f"a plain value; the tag {node.tag!r} is refused")
    if dataclasses.is_dataclass(kind):
        if not isinstance(node, yaml.MappingNode):
            return fault("settings as `name: value`")
        return typing.cast(Any, kind)(**dict(_entries(node, kind, path, faults)))
    if typing.get_origin(kind) is tuple:
        if not isinstance(node, yaml.SequenceNode):
            return fault("a list, e.g. [3, 7]")
        item_kind = typing.get_args(kind)[0]
        return tuple(_read(item, item_kind, f"{path}[{index}]", faults) for index, item in enumerate(node.value))
    if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
        return fault("a single value ('' for empty text)")
    return _read_scalar(node, kind, fault)


def _entries(node: yaml.MappingNode, kind: Any, path: str, faults: list[Fault]) -> Iterator[tuple[str, Any]]:
    kinds = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    seen: set[str] = set()
    for key_node, value_node in node.value:
        name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "(no name)"
        inner = f"{path}.{name}" if path else name
        line = f"line {key_node.start_mark.line + 1}"
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else f"known here: {', '.join(names)}"
            faults.append(Fault(path=inner, found=f"{line}: an unknown setting", remedy=remedy))
        elif name in seen:
            faults.append(Fault(path=inner, found=f"{line}: given a second time", remedy="keep one of the two"))
        else:
            seen.add(name)
            yield name, _read(value_node, kinds[name], inner, faults)


def _read_scalar(node: yaml.ScalarNode, kind: Any, fault: typing.Callable[[str], None]) -> Any:
    text, is_quoted = node.value, node.style in ("'", '"')
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        nearest = difflib.get_close_matches(text, choices, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        return text if text in choices else fault(f"one of {', '.join(choices)}{hint}")
    if kind is str:
        return text
    if kind is bool:
        is_bool = text in ("true", "false") and not is_quoted
        return text == "true" if is_bool else fault("true or false")
    if kind is int:
        is_integer = re.fullmatch(r"[-+]?\d{1,18}", text) and not is_quoted
        return int(text) if is_integer else fault("a whole number")
    # YAML 1.1 takes `1e-4` for text; here the field's type decides. Infinity and NaN are no settings.
    is_number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", text) and not is_quoted
    if not is_number or abs(float(text)) == float("inf"):
        return fault("a finite number")
    return float(text)
