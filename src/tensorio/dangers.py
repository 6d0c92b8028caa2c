"""What known names can do if a loader that imports them calls them: for explanation only.

Nothing in tensorio is decided to be harmless by this table: what may be used stands in `tensorio.allowlist`, and what
is in neither is unknown. A name is here if it runs code or programs, opens files or connections, or leads to names that
the pickle does not spell (then what is called can't be read off it). What only combines other names, such as
``functools.partial``, is not: those others are listed themselves.
"""

from __future__ import annotations

import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Set
from functools import lru_cache

__all__ = ["CALLERS", "SPECIAL_ATTRIBUTES", "danger", "danger_when_called", "python3_name"]

_RUNS = "runs code given as text or bytes"
_PROGRAM = "starts programs"
_SYSTEM = "runs programs and changes files through the operating system"
_FILES = "reads, writes or deletes files"
_NETWORK = "opens network connections"
_IMPORTS = "imports any module"
_LEADS = "leads to objects that the pickle does not name"
_MEMORY = "reaches raw memory and libraries"
_NESTED = "loads a second pickle, from a file or from bytes"
_TESTS = "is a tool of developers that runs code or programs"
_INTERPRETER = "changes the running interpreter"

# Reason -> modules, all below them included.
_FAMILIES = {
    _SYSTEM: "os posix nt posixpath ntpath _winapi winreg _winreg msvcrt platform sysconfig",
    _PROGRAM: "subprocess _posixsubprocess pty popen2 commands multiprocessing _multiprocessing concurrent.futures "
              "asyncio sched _xxsubinterpreters _interpreters",
    _FILES: "shutil tempfile glob fileinput zipfile tarfile dbm dumbdbm gdbm anydbm whichdb sqlite3 _sqlite3 mmap "
            "fcntl filecmp linecache mailbox netrc _io",
    _NETWORK: "socket _socket ssl _ssl socketserver SocketServer http httplib urllib urllib2 urlparse ftplib smtplib "
              "smtpd poplib imaplib nntplib telnetlib xmlrpc xmlrpclib wsgiref webbrowser antigravity requests urllib3 "
              "aiohttp httpx paramiko ftputil",
    _IMPORTS: "importlib imp pkgutil zipimport zipapp pip ensurepip setuptools pkg_resources site venv",
    _LEADS: "operator _operator sys gc inspect",
    _MEMORY: "ctypes _ctypes cffi _cffi_backend numpy.ctypeslib",
    _NESTED: "pickle cPickle _pickle pickletools shelve marshal dill cloudpickle _dill jsonpickle",
    _RUNS: "runpy code codeop timeit trace cgi cgitb sympy.parsing sympy.core.sympify jinja2 mako execnet "
           "numexpr lib2to3 idlelib rlcompleter",
    _TESTS: "bdb pdb cProfile profile hotshot doctest unittest test pytest _pytest nose pydoc pyclbr distutils "
            "numpy.testing numpy.f2py numpy.distutils torch.testing torch.utils.collect_env torch.utils.cpp_extension "
            "torch.utils.bottleneck torch.utils.benchmark torch.hub torch.package torch._dynamo torch._inductor "
            "torch.ops torch.classes torch.distributed.rpc torch.distributed.elastic torch.distributed.run "
            "torch.distributed.launch torch.jit.unsupported_tensor_ops torch.jit.annotations torch.jit.frontend "
            "torch.fx.experimental torch.utils._config_module torch.multiprocessing",
    _INTERPRETER: "signal _signal atexit threading _thread thread faulthandler resource readline syslog logging.config "
                  "curses _curses tkinter Tkinter turtle this _testcapi _testinternalcapi _frozen_importlib "
                  "_frozen_importlib_external _imp",
}  # fmt: skip

# Reason -> module: names.
_SINGLE = {
    _RUNS: "builtins: exec eval compile execfile; types: CodeType FunctionType LambdaType; pandas: eval; "
           "pandas.core.computation.eval: eval; torch.fx.graph_module: reduce_graph_module reduce_package_graph_module "
           "_exec_with_source _forward_from_src; "
           "torch.fx._lazy_graph_module: reduce_graph_module; keras.src.utils.python_utils: func_load; yaml: load "
           "unsafe_load full_load load_all unsafe_load_all; typing: get_type_hints",
    _LEADS: "builtins: getattr globals locals vars; types: MethodType ModuleType",
    _INTERPRETER: "builtins: setattr delattr breakpoint input raw_input reload exit quit help; copyreg: add_extension "
                  "remove_extension clear_extension_cache pickle constructor dispatch_table",
    _IMPORTS: "builtins: __import__",
    _FILES: "builtins: open file; io: open open_code FileIO; codecs: open EncodedFile; gzip: open GzipFile; "
            "bz2: open BZ2File; lzma: open LZMAFile; numpy: load save savez savez_compressed savetxt loadtxt "
            "genfromtxt fromfile memmap fromregex DataSource; numpy.lib.npyio: load save savez savetxt loadtxt "
            "genfromtxt DataSource; numpy.lib.format: open_memmap; torch: save from_file; "
            "torch.serialization: save; logging: FileHandler; torch.storage: TypedStorage.from_file",
    _PROGRAM: "uuid: _get_command_stdout _popen _netstat_getter _ifconfig_getter _ip_getter _arp_getter "
              "_lanscan_getter; "
              "_osx_support: _read_output _find_build_tool; _aix_support: _read_cmd_output; ctypes.util: "
              "find_library; torch._utils_internal: log_export_usage",
    _NESTED: "torch: load; torch.serialization: load _load _legacy_load; torch.jit: "
             "load; torch.jit._serialization: load; pandas: read_pickle; pandas.io.pickle: read_pickle; joblib: load; "
             "joblib.numpy_pickle: load; sklearn.externals.joblib: load; numpy.lib.format: read_array; "
             "multiprocessing.reduction: loads",
}  # fmt: skip


def _spread(table: dict[str, str]) -> dict[str, str]:
    return {module: reason for reason, modules in table.items() for module in modules.split()}


def _spread_names(table: dict[str, str]) -> dict[tuple[str, str], str]:
    out = {}
    for reason, lines in table.items():
        for line in lines.split(";"):
            module, _, names = line.partition(":")
            out.update({(module.strip(), name): reason for name in names.split()})
    return out


MODULES = _spread(_FAMILIES)
SINGLE = _spread_names(_SINGLE)

# Special names that only make objects of classes which the pickle names, too (CPython's Lib/copyreg.py).
_MAKERS = {("copyreg", "__newobj__"), ("copyreg", "__newobj_ex__"), ("copyreg", "__reduce_ex__")}

# Classes that pickles of plain data name, whose constructor does more than hold data: reason, and what does not run it.
_WHEN_CALLED = {
    **dict.fromkeys(
        [("numpy", "memmap"), ("numpy.core.memmap", "memmap"), ("numpy._core.memmap", "memmap")],
        ("opens files, and overwrites them, when it is called", {"BUILD"}),
    ),
    **dict.fromkeys(
        [("torch.distributed.device_mesh", "DeviceMesh"), ("torch.distributed._tensor.device_mesh", "DeviceMesh")],
        (
            "connects to other processes when it is called",
            {"BUILD", "NEWOBJ", "NEWOBJ_EX", "__newobj__", "__newobj_ex__"},
        ),
    ),
}

# Functions that call what they are given: which of their arguments.
CALLERS = {
    "_reconstructor": (0, 1), "__newobj__": (0,), "__newobj_ex__": (0,), "_rebuild_from_type": (0,),
    "_rebuild_from_type_v2": (0,),
}  # fmt: skip

# Attributes that change what an object does when it is used: no state that was saved has them.
_SPECIAL = (
    "class dict slots bases mro subclasses init new del call getattr getattribute setattr delattr get set delete "
    "reduce reduce_ex getstate setstate getnewargs getnewargs_ex getinitargs copy deepcopy hash eq repr str bytes "
    "format len bool iter next contains getitem setitem delitem missing enter exit globals builtins code closure "
    "defaults kwdefaults func self wrapped import loader spec path init_subclass subclasshook class_getitem "
    "set_name prepare instancecheck subclasscheck array array_interface array_struct array_ufunc array_function "
    "torch_function torch_dispatch cuda_array_interface dlpack index int float fspath buffer"
)
SPECIAL_ATTRIBUTES = frozenset(f"__{word}__" for word in _SPECIAL.split())

# A class in a class has such a name; anything else with a dot walks through what a module happens to hold.
_NESTED_CLASS = re.compile(r"_*[A-Z]\w*(\._*[A-Z]\w*)+")


def python3_name(module: str, name: str) -> tuple[str, str]:
    """Return the name that a loader of Python 3 takes for one of Python 2; most are the same."""
    renamed = NAME_MAPPING.get((module, name))
    return renamed if renamed is not None else (IMPORT_MAPPING.get(module, module), name)


@lru_cache(maxsize=1024)
def danger(module: str, name: str) -> str | None:
    """Say in a few words what a loader that imports this name lets a file do; None if nothing is known of it."""
    if "\0" in module or "\0" in name:
        return "has a NUL in it: readers differ on what it names"
    today = python3_name(module, name)
    return _known(module, name) or _known(*today) or (None if today in _MAKERS else _walks(module, name))


def danger_when_called(module: str, name: str, uses: Set[str]) -> str | None:
    """Say what a name that is harmless as data can do by the way it is used (opcodes, and names of `CALLERS`)."""
    reason, harmless = _WHEN_CALLED.get((module, name), (None, uses))
    return reason if uses - harmless else None


def _known(module: str, name: str) -> str | None:
    exact = SINGLE.get((module, name))
    if exact is not None:
        return exact
    parts = module.split(".", 8)
    return next((MODULES[m] for n in range(len(parts), 0, -1) if (m := ".".join(parts[:n])) in MODULES), None)


def _walks(module: str, name: str) -> str | None:
    """Whether the name leads through attributes, or the module, to something else."""
    parts = name.split(".", 64)
    if any(part.startswith("__") and part.endswith("__") and len(part) > 4 for part in parts):
        return "is a special attribute: it leads to the inside of a module or class"
    if len(parts) == 1:
        return None
    if _NESTED_CLASS.fullmatch(name[:256]) is None:
        return "walks through attributes of a module to something else"
    inner = f"{module}.{'.'.join(parts[:-1])}"
    return SINGLE.get((inner, parts[-1]))
