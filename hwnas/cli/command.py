"""The parts that the commands share: Hydra overrides in, one line and exit code 2 for errors that the user can mend."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

from hwnas.cli.options import MANDATORY, Config, defaults, flat_options
from hwnas.cli.progress import Console, show
from hwnas.errors import ConfigError, HwnasError, Unfinished, UnknownName, UserError, did_you_mean, hidden
from hwnas.lazy import hydra, omegaconf, yaml
from hwnas.system.documents import load_yaml, yaml_text
from hwnas.system.paths import data_dirs, find_home, name_fault, no_space, shipped, unusable
from hwnas.system.processes import ended_by_signals, exit_code
from hwnas.system.run_folder import RunFolder

if TYPE_CHECKING:
    from omegaconf import DictConfig


COMMANDS = {  # command, which is the module of this name, and its help
    "search": "find the front of accuracy and latency on this host: the main job",
    "profile": "measure this host for a target and a space",
    "validate": "hold predicted latency against measured, on networks never seen",
    "benchmark": "time one network, and explain its time",
    "zoo": "which of timm's networks is the fastest for its published top-1 here",
    "choose": "the cheapest network and deployment that serve a load at a service level",
    "train": "train one network in full",
    "quantize": "int8 with an accuracy limit kept",
    "verify": "score and time a run's finalists on this machine",
    "report": "write a run's pictures and report again",
    "predict": "classify a folder of images with a network",
    "export": "write what is deployed of a network, for pixels or a server; or copy a run",
    "worker": "join a search as one more worker",
}
GROUPS = {"target": "target", "dataset": "data set", "objective": "objective"}  # folders of conf/
_DATASETS = "hwnas.datasets"  # entry points: data sets of other packages
# Groups whose keys and defaults are a dataclass's; conf/ holds only what differs from them.
_SECTIONS = {"target": "hwnas.target:Target", "dataset": "hwnas.data.dataset:DatasetOptions"}
_TARGET_SET = "hwnas.target:TargetSet"
OF_SETS = ("search", "worker", "zoo")  # commands that take a set of targets
_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm")
_LAYOUT = re.compile(r"images|labels|annotations|jpegimages|data|\..*|(train|val|valid|validation|test)([^a-z].*|ing)?")
_HOLDS = {  # data set, and the files by which a folder is known as one for it
    "timm:hfds": ("state.json", "dataset_dict.json", "*.parquet", "data/*.parquet"), "arrays": ("*.npy",),
    "timm:tar": ("train.tar", "training.tar"),
    "yolo": ("data.yaml", "data.yml", "labels/*.txt", "labels/*/*.txt", "*/labels/*.txt"),
    "voc": ("[Aa]nnotations/*.xml", "[Aa]nnotations/*/*.xml", "train/*.xml", "*.xml"),
    "coco": ("*/_annotations.coco.json", "[Aa]nnotations/*.json", "train.json")}
_NAMES_OF_YOLO = ("classes.txt", "train/classes.txt")  # beside other layouts, too, so it is tried last
_QUOTES = "'\""
_without_passwords = partial(hidden, whole=True)
_DEPLOYMENTS = re.compile(rb"^[^#\n]*\bdeployments[\"']?\s*:", re.MULTILINE)  # the key of a set of targets
_RESOLVER = re.compile(r"(?<!\\)(?:\\\\)*\$\{.*:", re.DOTALL)  # ${name:…}, also with something to resolve in the name
# The paths, ids and names of all commands, whose values are taken as they are typed.
_PATHS = ("out", "run", "id", "architecture", "host", "device_name", "key", "dataset.root", "space",
          "model", "weights", "pretrained.file", "pretrained.folder", "training.weights", "search.reuse",
          "prices", "plot", "images", "storage", "device", "device_python")
EXIT_CODES = """exit codes:
  0    done
  1    not done, for a reason that no option mends: the last line says which
  2    bad input, where nothing was changed, or a full disk: one line says what is wrong, where, and what to do
  3    done in part: the last line says what is missing
  130  ended by Ctrl-C (143: by SIGTERM, 129: by the end of a session); the same command goes on"""
Main = Callable[["DictConfig", Console], object]
Sections = Callable[["DictConfig"], Mapping[str, Any]]


def run_command(main: Main, config_name: str, usage: str, argv: Sequence[str] | None = None, target: bool = True,
                lists: Sequence[str] = (), sections: Sections | None = None) -> int:
    """Compose `conf/<config_name>.yaml` with the command line's overrides, call `main`, and return the exit code.

    EXIT_CODES says what the codes mean.
    `target`: a target must be chosen. `lists`: options for which 1,2,4 is a list. `sections` gives all options of the
    sections of which the configuration has only a part, and the values of options that it leaves open (null).
    """
    os.environ.setdefault("OPENVINO_TELEMETRY_OPTOUT", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost training ten times on a busy machine
    os.environ["OMP_PROC_BIND"] = "false"  # bound threads: torch would keep this process and its children to one core
    os.environ["PYTHONSAFEPATH"] = "1"  # a user's types.py in the current folder would be taken for Python's
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another language shows what it can
    parser = _parser(config_name, usage, target)
    options = parser.parse_intermixed_args(argv)
    console = Console(quiet=options.quiet)
    try:
        with ended_by_signals():
            needs = target and not options.show_config
            values = {key: as_data(value) for key, value in (text.split("=", 1) for text in options.as_is)}
            config = compose(config_name, as_typed(options.overrides, lists), needs, values)
            if options.show_config:
                show(_shown(config, sections(config) if sections else {}).removesuffix("\n"))
                return 0
            main(config, console)
            return 0
    except UserError as error:
        return _fail(error, 2)
    except Unfinished as error:
        return _fail(error, 3 if error.part else 1)
    except HwnasError as error:
        return _fail(error, 1)
    except KeyboardInterrupt as interrupt:
        console.say("interrupted; the same command goes on from here.")
        return exit_code(interrupt)
    except BrokenPipeError:  # not of stdout or stderr: `show` and Console outlive their readers
        return _fail(HwnasError("a process that this command talked to has ended. Give the same command again."), 1)
    except OSError as error:
        if (user_error := no_space(error) or unusable(error)) is None:
            raise
        return _fail(user_error, 2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, with the right form in place of `--key value`, and exit with code 2."""
        if unknown := re.search(r"unrecognized arguments: --?([\w.-]+)", message):
            message = f"options are written without dashes: {unknown[1].replace('-', '_')}=VALUE (of {self.prog})"
        print(f"ConfigError: {_without_passwords(message)}", file=sys.stderr)
        raise SystemExit(2)


def _parser(config_name: str, usage: str, target: bool) -> _Parser:
    parser = _Parser(prog=f"hwnas {config_name}", description=usage,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-q", "--quiet", action="store_true", help="print results and warnings only")
    parser.add_argument("--show-config", action="store_true", help="print every option with its value and stop")
    parser.add_argument("--as-is", action="append", default=[], help=argparse.SUPPRESS)  # between our own processes
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of the configuration")
    parser.epilog = EXIT_CODES
    if target:
        parser.epilog = f"targets: {', '.join(target_names(config_name))}\n\n{EXIT_CODES}"
    return parser


def names_in(group: str) -> list[str]:
    """Return the names to choose from in a config group: YAML files, the user's too, and other packages' data sets."""
    names = {path.stem for folder in data_dirs("conf") for path in (folder / group).glob("*.yaml")}
    if group == "dataset":
        names |= {point.name for point in entry_points(group=_DATASETS)}
    return sorted(names)


def target_names(command: str) -> list[str]:
    """Return the names of the targets that a command takes: sets of targets for some commands only."""
    return [name for name in names_in("target") if command in OF_SETS or not _is_set(name)]


def _is_set(target: str) -> bool:
    path = file_in("target", target)
    try:
        return path is not None and _DEPLOYMENTS.search(path.read_bytes()) is not None
    except OSError:  # an error for the command that chooses it
        return False


def file_in(group: str, name: str) -> Path | None:
    """Return the YAML file `name` of a config group, the user's before the shipped one; None if there is none."""
    files = (folder / group / f"{name}.yaml" for folder in data_dirs("conf"))
    return next((file for file in files if file.is_file()), None)


def as_typed(overrides: Sequence[str], lists: Sequence[str] = ()) -> list[str]:
    """Return overrides with `1,2,4` of `lists` in brackets, and a path behind dataset= as its root."""
    texts = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key in lists and re.fullmatch(r"\d+(,\d+)+", value):
            value = f"[{value}]"
        elif key.lstrip("+") == "dataset" and "/" in value.partition(":")[0]:
            texts.append(f"dataset.root={value}")
            value = reader_of(Path(value).expanduser())
        texts.append(key + equals + value)
    return texts


def reader_of(path: Path) -> str:
    """Return the data set that reads a file or a folder, by its content."""
    if path.suffix == ".tar":
        return "timm:tar"
    if path.suffix in (".npz", ".npy"):
        return "arrays"
    # The files of a layout decide, unless the folder also has folders of images, one for each class.
    layouts = [*_HOLDS.items(), ("yolo", _NAMES_OF_YOLO)]
    holds = [name for name, patterns in layouts if any(map(any, map(path.glob, patterns)))]
    return holds[0] if holds and not (path.is_dir() and _has_classes(path)) else "imagefolder"


def _has_classes(path: Path) -> bool:
    """Return whether a folder, or its part for training, has folders of images with names that no layout uses."""
    folders = (folder for pattern in ("*/", "[Tt]rain*/*/") for folder in path.glob(pattern)
               if not _LAYOUT.fullmatch(folder.name.lower()))
    return any(each.suffix.lower() in _IMAGES for folder in folders for each in itertools.islice(folder.glob("*"), 99))


def as_data(values: Any) -> Any:
    """Return plain values for OmegaConf in which ${…} stays text: nothing from another process is resolved again."""
    # OmegaConf reads \${ as text, and each pair of backslashes before it as one.
    return _each_text(values, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def compose(config_name: str, overrides: Sequence[str], target: bool = True, values: Mapping[str, Any] | None = None
            ) -> DictConfig:
    """Return the checked configuration: nothing in it may name code and, with `target`, a target must be chosen.

    YAML in $HWNAS_HOME/conf (targets, data sets, objectives) comes before the shipped. A ~ at the beginning of a path
    is the user's home. `values` are further options by key, which are not text in Hydra's grammar.
    """
    # 1. Check the names first, so that a typing error is answered without the slow import of Hydra; read the values.
    texts, values = [text.lstrip("+") for text in overrides], dict(values or {})
    option_texts = values | {key: value for key, _, value in (text.partition("=") for text in texts)}
    _check_names(config_name, [*texts, *(f"{key}={value}" for key, value in values.items())], option_texts)
    keys = [text.partition("=")[0] for text in texts]
    if repeated_key := next((key for key in GROUPS if keys.count(key) > 1), None):
        raise ConfigError(f"{repeated_key} is given twice. Give it once.")
    override_values = {text.partition("=")[0]: _read_value(text) for text in texts} | values
    _check_chosen(config_name, option_texts, target)
    # 2. Let Hydra join the files of the command and its groups, and put the values of the overrides on top.
    chosen = _own_files(config_name, option_texts)
    _search_user_folder()
    try:
        with hydra.initialize_config_dir(str(shipped("conf")), version_base="1.3", job_name=config_name):
            config = hydra.compose(config_name, overrides=_files_for_hydra(config_name, option_texts))
        for key, value in override_values.items():
            if key == "dataset" and (":" in option_texts[key] or file_in(key, option_texts[key]) is None):
                omegaconf.OmegaConf.update(config, "dataset.name", option_texts[key].strip(_QUOTES), force_add=True)
            elif key not in _groups(config_name):
                key = "pretrained.use" if key == "pretrained" else key
                omegaconf.OmegaConf.update(config, key, value, force_add=True)
        # 3. Refuse code, before ${…} is resolved and again after; fill in defaults and the user's home.
        refuse_code(omegaconf.OmegaConf.to_container(config), "")
        _fill(config, config_name)
        _expand_homes(config)
        resolved = omegaconf.OmegaConf.to_container(config, resolve=True)
    except (hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException) as error:
        typed_texts = [f"{key}={value}" for key, value in values.items() if isinstance(value, str) and "${" in value]
        raise ConfigError(_hydra_message(error, [*overrides, *typed_texts])) from None
    except (yaml.YAMLError, OSError, ValueError, AssertionError) as error:  # a user's own file
        if not chosen and not isinstance(error, yaml.YAMLError | OSError | UnicodeDecodeError):
            raise
        raise ConfigError(f"{data_dirs('conf')[0]}: a file cannot be read ({error}). Mend or remove it.") from None
    name = option_texts.get("target")
    if name and (omegaconf.OmegaConf.is_missing(config, "target") or "target" not in config):
        raise ConfigError(f"{file_in('target', name)} gives no target. Mend or remove it.")
    refuse_code(resolved, "")
    return config


def _own_files(config_name: str, given: Mapping[str, str]) -> list[Path]:
    """Return the user's own files that are chosen. Raises ConfigError for a file that is torn, huge or no section, and
    for a file of a command's defaults."""
    users = data_dirs("conf")[:-1]
    if own := [path for folder in users if (path := folder / f"{config_name}.yaml").exists()]:
        raise ConfigError(f"{own[0]}: a command's defaults cannot be changed there. Remove it; targets, data sets and "
                          "objectives have folders of their own beside it.")
    paths = [folder / group / f"{given.get(group) or usual}.yaml"
             for folder in users for group, usual in _groups(config_name).items()]
    files = [path for path in paths if path.is_file()]
    for path in files:
        try:
            content = load_yaml(yaml_text(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}). Mend or remove it.") from None
        if content is not None and not isinstance(content, dict):
            raise ConfigError(f"{path}: must be a section of keys and values. Mend or remove it.")
    return files


@cache
def _search_user_folder() -> None:
    """Let Hydra look for targets, data sets and objectives in the user's folder before the shipped one."""

    class UserFolder(hydra.plugins.search_path_plugin.SearchPathPlugin):
        def manipulate_search_path(self, search_path: hydra.core.config_search_path.ConfigSearchPath) -> None:
            *users, ours = data_dirs("conf")
            if any(part.path in (str(ours), f"file://{ours}") for part in search_path.get_path()):
                for folder in filter(Path.is_dir, users):
                    search_path.prepend("hwnas", f"file://{folder}", "main")

    hydra.core.plugins.Plugins.instance().register(UserFolder)


def _files_for_hydra(config_name: str, given: Mapping[str, Any]) -> list[str]:
    """Return the overrides by which Hydra takes the chosen files of groups.

    A target is added to the defaults. A data set of another package has no file, so its group is removed.
    """
    chosen = []
    for group in _groups(config_name):
        if group in given:
            name = _reader(given[group])  # `timm:hfds` is read by `timm`
            key = "+target" if group == "target" else group
            chosen.append(f"~{group}" if file_in(group, name) is None else f"{key}={name}")
    return chosen


@cache
def _base(config_name: str) -> dict[str, Any]:
    """Return the content of the command's own YAML file."""
    content = yaml.safe_load((shipped("conf") / f"{config_name}.yaml").read_text(encoding="utf-8"))
    return dict(content)


def _groups(config_name: str) -> dict[str, str | None]:
    """Return the groups of which a command chooses a file, each with the name of the default file."""
    base, chosen = _base(config_name), dict[str, str | None]()
    for part in base.get("defaults", ()):
        chosen |= part if isinstance(part, dict) else {}
    return {**chosen, "target": None} if "target" in base else chosen


@cache
def _listed(config_name: str) -> list[str]:
    """Return a command's options as they are typed, `key=`, and `section.` for sections whose keys are not listed."""
    own = {name: value for name, value in _base(config_name).items() if name not in ("defaults", "target")}
    keys = [f"{key}." if isinstance(value, dict) else f"{key}=" for key, value in flat_options(own)]
    return [*(f"{group}{mark}" for group in _groups(config_name) for mark in "=."), *keys]


def option_keys(config_name: str) -> list[str]:
    """Return the options of a command as they are typed, `key=`, or `section.` if nothing lists its keys."""
    # The keys of a section that has a dataclass are the fields of this.
    keys = [[f"{key}{name}=" for name in defaults(resolve_name(_SECTIONS[key[:-1]])) if name != "name"]
            if key[:-1] in _SECTIONS and key[-1] == "." else [key] for key in _listed(config_name)]
    return list(dict.fromkeys(itertools.chain.from_iterable(keys)))


def _fill(config: omegaconf.DictConfig, command: str) -> None:
    """Put the defaults of their dataclasses below the sections. Raises UnknownName for a key that a section does not
    have, ConfigError for a set of targets if the command takes one target."""
    for name in _SECTIONS:
        if (name not in config or omegaconf.OmegaConf.is_missing(config, name)
                or not isinstance(config[name], omegaconf.DictConfig)):
            continue
        default_values = defaults(resolve_name(_SECTIONS[name]))
        if name == "target" and "deployments" in config[name]:
            default_values = defaults(resolve_name(_TARGET_SET))
            if command not in OF_SETS:
                raise ConfigError(f"target={config[name].get('name')} is a set of targets, and hwnas {command} takes "
                                  f"one: target=NAME, of {', '.join(target_names(command))}.")
        if "name" not in config[name]:
            continue  # of verify or worker: only the differences from the run's data set
        for key in config[name]:
            if key not in default_values:
                raise UnknownName(f"key of {name}", key, default_values)
        whole = {key: value for key, value in default_values.items() if value != MANDATORY or key in config[name]}
        with omegaconf.open_dict(config):
            config[name] = omegaconf.OmegaConf.merge(whole, config[name])


def _expand_homes(config: DictConfig) -> None:
    for key in (key for key in _PATHS if key != "device_python"):  # that ~ is the home on the device
        value = omegaconf.OmegaConf.select(config, key)
        if isinstance(value, str) and value.startswith("~"):
            whole = os.path.expanduser(value)
            if whole.startswith("~"):
                raise ConfigError(f"{key}={value}: nobody says which home ~ is. Set HOME, or write the whole path.")
            omegaconf.OmegaConf.update(config, key, as_data(whole))


def _reader(dataset: str) -> str:
    """Return the part of NAME or READER:NAME, a data set, that names its file in conf/dataset: NAME or READER."""
    return dataset.strip(_QUOTES).partition(":")[0]


def _check_names(config_name: str, overrides: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a text that is no override, or names an option that the command does not have.

    Nothing is imported for it, so that a typing error is answered at once. The keys of the dataclasses in `_SECTIONS`
    are checked later, by `_fill`.
    """
    try:
        current_folder = os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was removed. Go to another one.") from None
    for text in (*overrides, current_folder, str(find_home() or "")):
        if fault := name_fault(text):
            raise ConfigError(f"{text!a}: this name {fault}")
    listed, groups = _listed(config_name), _groups(config_name)
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals:
            form = f"{text}=…" if f"{text}=" in listed else f"key={text}"
            raise ConfigError(f"{text!r} is not an override. Write {form}; --show-config prints all there are.")
        if "accuracy" in _base(config_name) and key.partition(".")[0] == given.get("accuracy"):
            continue  # the section of an estimator of another package
        # A known key is a group, an option, an option below an open section, or a whole section.
        is_known = key in groups if key in GROUPS else f"{key}=" in listed or f"{key}." in listed or any(
            key.startswith(name) if name[-1] == "." else name.startswith(f"{key}.") for name in listed)
        if not is_known:
            names = [name.rstrip("=.") for name in option_keys(config_name)]
            name = _without_passwords(text).partition("=")[0]
            raise ConfigError(f"no option of {config_name} is called {name!r}.{did_you_mean(key, names, 0.7)} "
                              "--show-config prints all there are.")


def _check_chosen(config_name: str, given: Mapping[str, Any], target: bool) -> None:
    """Raise ConfigError or UnknownName for a target that is missing, and for a name that its group does not have."""
    if target and "target" not in given:
        raise ConfigError(f"no target chosen. Add target=NAME: {', '.join(target_names(config_name))}.")
    for group in GROUPS.keys() & given.keys():
        name = _reader(given[group]) if group == "dataset" else given[group]
        if name not in names_in(group):
            if group == "dataset" and os.path.isdir(name):
                raise ConfigError(f"unknown data set {name!r}. The folder of this name is dataset=./{name}")
            raise UnknownName(GROUPS[group], name, names_in(group))


def _read_value(text: str) -> Any:
    """Return the value of an override by Hydra's grammar. A path or a name is taken as it is typed, unless it is in
    quotes: the grammar uses some of its characters. Raises ConfigError for several values."""
    key, _, value = text.partition("=")
    is_path = key in _PATHS and not (key == "images" and value.isdecimal())  # hwnas quantize: how many
    if is_path and value not in ("", "null") and not (value[0] in _QUOTES and value[1:].endswith(value[0])):
        return value
    parser = hydra.core.override_parser.overrides_parser.OverridesParser.create()
    try:  # Hydra is imported by now: after a Ctrl-C during its import, `except` could not look up its errors
        override = parser.parse_override(text)
    except hydra.errors.HydraException as error:
        if _without_passwords(text) != text:
            raise ConfigError(_hydra_message(error, [text])) from None
        escaped = value.replace("'", "\\'")
        raise ConfigError(f"{text} cannot be read. Mend its brackets and commas, or write a text in quotes: "
                          f"\"{key}='{escaped}'\"") from None
    if override.is_sweep_override():
        listed = "" if key in GROUPS else f", or write {key}=[{value}] where the option takes a list"
        raise ConfigError(f"{text} gives several values. Give one{listed}.")
    return override.value()


def _shown(config: DictConfig, sections: Mapping[str, Any]) -> str:
    """Return the configuration as YAML, with the options of `sections` (by dotted key) that were not given."""
    own_values = _each_text(omegaconf.OmegaConf.to_container(config), _without_passwords)
    # A value of the configuration replaces the section's, but null does not.
    shown = omegaconf.OmegaConf.create(own_values)
    for key, values in sections.items():
        omegaconf.OmegaConf.update(shown, key, values, merge=False)
    set_values = {key: value for key, value in own_values.items() if value is not None or key not in sections}
    return omegaconf.OmegaConf.to_yaml(omegaconf.OmegaConf.merge(shown, set_values))


def kept(config: Config) -> str:
    """Return the configuration as YAML that may be stored.

    A text that a resolver makes, such as ${oc.env:NAME}, stays as it was typed. *** replaces the password of a URL.
    """
    raw: Any = config if omegaconf.OmegaConf.is_config(config) else omegaconf.OmegaConf.create(dict(config))
    typed = _each_text(omegaconf.OmegaConf.to_container(raw),
                       lambda text: as_data(text) if _RESOLVER.search(text) else text)
    values = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(typed), resolve=True)
    stored = as_data(_each_text(values, _without_passwords))
    return omegaconf.OmegaConf.to_yaml(omegaconf.OmegaConf.create(stored), resolve=True)


def unresolved(values: Any, where: str) -> Iterator[str]:
    """Yield the keys of plain values, behind `where`, whose texts stay as they were typed; see `kept`."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from unresolved(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, str) and _RESOLVER.search(values):
        yield where


def _each_text(values: Any, change: Callable[[str], str]) -> Any:
    """Return plain values with each text changed."""
    if isinstance(values, dict):
        return {key: _each_text(value, change) for key, value in values.items()}
    if isinstance(values, list):
        return [_each_text(value, change) for value in values]
    return change(values) if isinstance(values, str) else values


def _hydra_message(error: Exception, overrides: Sequence[str]) -> str:
    text = " ".join(str(error).split())
    shown = [*map(_without_passwords, overrides)]
    if shown != [*overrides]:  # Hydra's text may hold a part of the password
        text = "the options cannot be read. Write the value with the password in quotes, or keep it in an " \
               "environment variable: key='${oc.env:NAME}'"
    return f"{text} (in: {' '.join(shown)})"


def refuse_code(values: object, where: str) -> None:
    """Raise ConfigError if a configuration names code to run: it has one of Hydra's instantiation keys anywhere."""
    if isinstance(values, dict):
        for key, value in values.items():
            if str(key) in ("_target_", "_partial_", "_args_", "_convert_", "_recursive_"):
                raise ConfigError(f"{where}{key}: configurations cannot name code to run; remove the key.")
            refuse_code(value, f"{where}{key}.")
    elif isinstance(values, list):
        for index, value in enumerate(values):
            refuse_code(value, f"{where}{index}.")


def _fail(error: Exception, code: int) -> int:
    Console().say(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return code


def opened_run(config: Config) -> RunFolder:
    """Return the run folder that `run=DIR` names. Raises ConfigError without a name, StudyError if it is none."""
    if not config.get("run"):
        raise ConfigError("which run folder? Add run=DIR.")
    return RunFolder.open(str(config["run"]))
