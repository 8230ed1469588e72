"""Every environment variable fi reads, typed, in one table; the only module that touches os.environ.

Use: `from fi_core.runtime.env import env; env.jit`. A value is parsed each time it is read, so a test or a launch
script may change it; `when` says at which moment the library looks. FI_X wins over its alias FLASHINFER_X; an empty
value counts as unset; unknown variables are ignored.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

T = TypeVar("T")
When = Literal["import", "build", "call"]


class Parser(NamedTuple):
    """The conversion of a text to a value, and a description of the accepted texts."""

    parse: Callable[[str], Any]  # raises ValueError on a text that is not allowed
    allowed: str


class EnvRow(NamedTuple):
    """One line of the documentation table."""

    name: str
    aliases: tuple[str, ...]
    allowed: str
    default: str
    when: When
    doc: str
    set_by: str | None  # the name that is set in this process, None if the default holds


class Variable(Generic[T]):
    """Descriptor of one variable; the attribute name in upper case is the variable name after its prefix."""

    def __init__(
        self,
        parser: Parser,
        default: T,
        when: When,
        doc: str,
        *,
        derive: Callable[[], T] | None = None,
        default_doc: str | None = None,
        prefixed: bool = True,
        aliases: tuple[str, ...] = (),
    ) -> None:
        self.parser, self.default, self.doc = parser, default, doc
        self.when: When = when
        self.derive, self.default_doc = derive, default_doc
        self.prefixed, self.aliases = prefixed, aliases
        self.name = ""

    def __set_name__(self, owner: type, attribute: str) -> None:
        stem = attribute.upper()
        self.name = f"FI_{stem}" if self.prefixed else stem
        if self.prefixed:
            self.aliases = (f"FLASHINFER_{stem}", *self.aliases)

    @overload
    def __get__(self, instance: None, owner: type) -> Variable[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Variable[T] | T:
        return self if instance is None else self.read()

    def set_by(self) -> str | None:
        """The name under which the user set this variable, or None."""
        return next((name for name in (self.name, *self.aliases) if os.environ.get(name)), None)

    def read(self) -> T:
        name = self.set_by()
        if name is None:
            return self.derive() if self.derive else self.default
        text = os.environ[name]
        try:
            return self.parser.parse(text)  # type: ignore[no-any-return]
        except ValueError:
            raise ValueError(f"{name}: allowed are {self.parser.allowed}; got {text!r}") from None

    def row(self) -> EnvRow:
        text = self.default_doc
        if text is None:
            default: Any = self.default
            text = "unset" if default in (None, "", ()) else str(int(default) if isinstance(default, bool) else default)
        return EnvRow(self.name, self.aliases, self.parser.allowed, text, self.when, self.doc, self.set_by())


def _choice(*words: str) -> Parser:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError
        return text.lower()

    return Parser(parse, " | ".join(words))


def _integer(minimum: int) -> Parser:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError
        return value

    return Parser(parse, f"an integer >= {minimum}")


def _parse_number(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError
    return value


_BOOL_WORDS = {"0": False, "1": True, "off": False, "on": True, "false": False, "true": True}


def _parse_bool(text: str) -> bool:
    if text.lower() not in _BOOL_WORDS:
        raise ValueError
    return _BOOL_WORDS[text.lower()]


def _parse_arch_list(text: str) -> tuple[str, ...]:
    words = tuple(text.split())
    if not words or not all(re.fullmatch(r"\d+\.\d+[af]?", word) for word in words):
        raise ValueError
    return words


def _subset(*words: str) -> Parser:
    def parse(text: str) -> tuple[str, ...]:
        found = {word.strip() for word in text.split(",")}
        if not found <= set(words):
            raise ValueError
        return tuple(word for word in words if word in found)

    return Parser(parse, f"a comma separated list of {' and '.join(words)}")


BOOL = Parser(_parse_bool, "0 | 1")
FLAG = Parser(lambda text: True, "any non-empty value")
NOT_ZERO = Parser(lambda text: text != "0", "0 | any other value")
TEXT = Parser(str, "any text")
PATH = Parser(lambda text: Path(text).expanduser().absolute(), "a path")
WORDS = Parser(lambda text: tuple(shlex.split(text)), "words, split as a shell does")
COMMAS = Parser(
    lambda text: tuple(w.strip() for w in text.split(",") if w.strip()), "a comma separated list of patterns"
)
NUMBER = Parser(_parse_number, "a number >= 0")
ARCHS = Parser(_parse_arch_list, "space separated major.minor[suffix], such as '8.0 9.0a'")
POSITIVE = _integer(1)


def temporary() -> Path:
    """The directory for temporary files; /tmp if no such directory can be written."""
    import tempfile

    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/tmp")


def for_child(**changes: str) -> dict[str, str]:
    """The environment of this process with changes, for a process that it starts."""
    return {**os.environ, **changes}


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a uid without a passwd entry and without HOME, as in some containers
        return temporary() / f"fi-{os.getuid()}"


class Env:
    """The table. Read a value as an attribute of `env`, the one instance."""

    # Places
    workspace_base = Variable[Path](
        PATH, Path("~"), "call", "Directory that holds .cache/fi.", derive=_home, default_doc="the home directory"
    )
    cache_dir = Variable[Path](
        PATH,
        Path("~/.cache/fi"),
        "call",
        "Root of everything fi writes: compiled kernels, generated sources, logs.",
        derive=lambda: env._default_cache(),
        default_doc="$FI_WORKSPACE_BASE/.cache/fi if that is set, $XDG_CACHE_HOME/fi, ~/.cache/fi",
    )
    xdg_cache_home = Variable[Path | None](
        PATH, None, "call", "Directory of the caches of a user.", prefixed=False, default_doc="~/.cache"
    )
    shared_cache_dir = Variable[Path | None](
        PATH, None, "call", "A store that another user fills: its owner is trusted, it is read and never written."
    )
    cubin_dir = Variable[Path | None](
        PATH, None, "call", "Directory of prebuilt device binaries; used before the installed fi-cubin package."
    )
    disable_version_check = Variable[bool](
        FLAG, False, "call", "Use prebuilt packages even if their version differs from that of fi-core."
    )

    # Just-in-time compilation
    disable_jit = Variable[bool](FLAG, False, "call", "Older name for FI_JIT=off; FI_JIT wins if both are set.")
    jit = Variable[Literal["on", "warn", "off"]](
        _choice("on", "warn", "off"),
        "on",
        "call",
        "What to do with a kernel that is not prebuilt: compile it, compile and warn, or raise MissingKernelError.",
        derive=lambda: "off" if env.disable_jit else "on",
        default_doc="on; off if FI_DISABLE_JIT is set",
    )
    cuda_compiler = Variable[Literal["nvrtc", "nvcc"]](
        _choice("nvrtc", "nvcc"), "nvrtc", "build", "Compiler of device code at run time."
    )
    cuda_arch_list = Variable[tuple[str, ...]](
        ARCHS, (), "build", "Compile targets.", default_doc="the architectures of the visible GPUs"
    )
    jit_verbose = Variable[bool](
        BOOL, False, "build", "Stream the build output; implies debug flags while FI_JIT_DEBUG is unset."
    )
    jit_debug = Variable[bool | None](
        BOOL, None, "build", "Build for debuggers (-O0 -g); 0 keeps optimised code although FI_JIT_VERBOSE=1."
    )
    sanitize = Variable[tuple[str, ...]](
        _subset("address", "undefined"), (), "build", "Sanitizers in host modules; address needs LD_PRELOAD of libasan."
    )
    delays = Variable[str](
        _choice("arrivals", "waits", "waited", "copies", "barriers", "counters", "patience"),
        "",
        "build",
        "Random delays around one group of synchronising instructions of device code (`python tools/delays.py`).",
    )
    jit_lineinfo = Variable[bool](BOOL, False, "build", "Add -lineinfo for profilers.")
    jit_prebuild_max_jobs = Variable[int | None](
        POSITIVE, None, "build", "Compile jobs at once when many kernels are built ahead; wins over MAX_JOBS there."
    )
    aot_store = Variable[bool](
        BOOL, False, "build", "Build binary packages from the compiled kernels in FI_CACHE_DIR; add what it lacks."
    )
    aot_ops = Variable[tuple[str, ...]](
        COMMAS, (), "build", "Ops of a binary package that is built to try its release.", default_doc="every op"
    )
    aot_machine = Variable[str](
        _choice("x86_64", "aarch64"),
        "",
        "build",
        "Machine of the host modules of a binary package; others than this one need the cross compiler of Debian.",
        derive=platform.machine,
        default_doc="this machine",
    )
    max_jobs = Variable[int | None](
        POSITIVE, None, "build", "Compile jobs at once.", prefixed=False, default_doc="from the cores and the memory"
    )

    # Compilers
    nvcc = Variable[str | None](TEXT, None, "build", "The nvcc program.", default_doc="$CUDA_HOME/bin/nvcc")
    nvcc_threads = Variable[int](POSITIVE, 1, "build", "nvcc --threads=N.")
    nvcc_launcher = Variable[tuple[str, ...]](WORDS, (), "build", "Words before nvcc, such as ccache.")
    cxx_launcher = Variable[tuple[str, ...]](WORDS, (), "build", "Words before the C++ compiler, such as ccache.")
    extra_cflags = Variable[tuple[str, ...]](WORDS, (), "build", "Flags appended to every C++ compile.")
    extra_cudaflags = Variable[tuple[str, ...]](WORDS, (), "build", "Flags appended to every device compile.")
    extra_ldflags = Variable[tuple[str, ...]](WORDS, (), "build", "Flags of every link, before those of the spec.")
    cxx = Variable[tuple[str, ...]](WORDS, ("c++",), "build", "The C++ compiler.", prefixed=False, default_doc="c++")
    cc = Variable[str | None](TEXT, None, "build", "Host compiler given to nvcc as -ccbin.", prefixed=False)
    cuda_home = Variable[Path | None](
        PATH,
        None,
        "build",
        "Root of the CUDA toolkit.",
        prefixed=False,
        aliases=("CUDA_PATH",),
        default_doc="found from nvcc on PATH, then /usr/local/cuda",
    )

    # Checks and choices
    check = Variable[bool | None](
        BOOL,
        None,
        "import",
        "Check page tables, offsets and other indices: 0 nowhere, 1 on CUDA too (synchronises). 1 also looks "
        "for negated views in every call.",
        default_doc="on the CPU only",
    )
    batch_invariant = Variable[bool](
        BOOL, False, "import", "The bits of a row depend on the row alone in all calls: see fi_core.batch_invariant."
    )
    allow_experimental_auto_backends = Variable[bool](
        BOOL, False, "call", 'Let backend="auto" choose implementations marked experimental.'
    )

    # Serving engines
    vllm_layers = Variable[bool](
        BOOL,
        False,
        "import",
        "The plugin of vLLM also offers norms (provider fi) and replaces SwiGLU, rotary embeddings, experts, gated "
        "delta nets and sampling by top-k and top-p.",
    )

    # The command line
    no_color = Variable[bool](FLAG, False, "call", "No colours on a terminal (no-color.org).", prefixed=False)
    force_color = Variable[bool](FLAG, False, "call", "Colours also where there is no terminal.", prefixed=False)
    term = Variable[str](TEXT, "", "call", "Terminal type; dumb means no colours and no live progress.", prefixed=False)

    # Tables of tuned tactics
    autotune_cache_dir = Variable[Path | None](
        PATH, None, "call", "Where autotune_v2 keeps its tables.", default_doc="autotune below the cache folder"
    )

    # Logging, dumps, traces
    logging_level = Variable[Literal["debug", "info", "warning", "error", "critical"]](
        _choice("debug", "info", "warning", "error", "critical"), "info", "import", "Level of the build logger."
    )
    loglevel = Variable[int](
        _integer(0), 0, "import", "API log: 0 off; names from 1 on, inputs from 3, statistics from 5, dumps from 10."
    )
    logdest = Variable[str](TEXT, "stdout", "import", "API log target: stdout, stderr or a file; %i becomes the pid.")
    dump_dir = Variable[Path](PATH, Path("fi_dumps"), "import", "Where level 10 writes its dumps.")
    dump_max_size_gb = Variable[float](NUMBER, 20.0, "import", "Dumping stops after this many gigabytes.")
    dump_max_count = Variable[int](_integer(0), 1000, "import", "Dumping stops after this many calls.")
    dump_include = Variable[tuple[str, ...]](COMMAS, (), "import", "Only these functions are logged at level >= 3.")
    dump_exclude = Variable[tuple[str, ...]](COMMAS, (), "import", "These functions are not logged at level >= 3.")
    trace_dump = Variable[bool](
        NOT_ZERO, False, "import", "Write a benchmark definition for each op and its constants."
    )
    trace_apply_path = Variable[Path | None](
        PATH, None, "call", "The folder whose solutions/**/*.json `trace_apply.enable_apply()` runs."
    )
    trace_dump_dir = Variable[Path | None](PATH, None, "call", "Where FI_TRACE_DUMP writes; unset: nothing is written.")

    def _default_cache(self) -> Path:
        if type(self).workspace_base.set_by() is None and self.xdg_cache_home:
            return self.xdg_cache_home / "fi"
        return self.workspace_base / ".cache" / "fi"

    def table(self) -> Iterator[EnvRow]:
        """One row per variable, in the order of this class, for the documentation and the CLI."""
        for variable in vars(type(self)).values():
            if isinstance(variable, Variable):
                yield variable.row()

    def with_places(self, modules: Path, programs: Path) -> dict[str, str]:
        """The environment of a command that looks in these folders first, its Python processes for modules."""
        first = {"PYTHONPATH": modules, "PATH": programs}
        usual = {"PATH": os.defpath, **os.environ}
        return usual | {name: os.pathsep.join(filter(None, (str(at), usual.get(name)))) for name, at in first.items()}

    def present(self) -> dict[str, str]:
        """The raw values of every FI_*, FLASHINFER_* and table variable that is set, for environment reports."""
        known = {name for row in self.table() for name in (row.name, *row.aliases)}
        return {
            name: value
            for name, value in sorted(os.environ.items())
            if name in known or name.startswith(("FI_", "FLASHINFER_"))
        }


env: Env = Env()
