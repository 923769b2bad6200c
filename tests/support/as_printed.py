"""Command lines as a page or a help prints them, run in a folder of their own: only places are put in others' stead."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from support.waiting import wait_until

# Ctrl-C is heard also where the tests were started in the background. `doctor` asks only the server: asking this machine takes
# long, and has tests of its own.
_SLOTSTREAM = """\
#!{python}
import signal, sys
from slotstream.cli import doctor, main
signal.signal(signal.SIGINT, signal.default_int_handler)
doctor._nixl = lambda: doctor.Finding("nixl", "ok", "")
doctor._vllm = lambda: doctor.Finding("vllm", "ok", "")
sys.exit(main.main())
"""


def commands(page: str) -> list[tuple[str, str]]:
    """Of each command in a page's `console` blocks: the lines behind `$ ` and `> `, and what it prints there."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.M | re.S):
        for text in block.removeprefix("$ ").split("\n$ "):
            first, *lines = text.rstrip("\n").split("\n")
            more = [line[2:] for line in lines if line.startswith("> ")]
            found.append(("\n".join([first, *more]), "\n".join(line for line in lines if not line.startswith("> "))))
    return found


def is_as_shown(said: str, shown: str) -> bool:
    """Whether a command printed what its page shows, but for numbers, units of size, spaces and what stands where the page
    has `...`."""
    alike = [" ".join(re.sub(r"\d[\d.,:]*( [KMG]?i?B\b)?", "0", text).split()) for text in (said, shown)]
    return re.fullmatch(".*".join(re.escape(part) for part in re.split(r" ?\.\.\. ?", alike[1])), alike[0]) is not None


class Shell:
    """bash in `folder`, which is also the home. `slotstream` and `python` are those of these tests, and `ssh`
    goes to the folder `host` in it.

    `names`: what lines name -> what there is in its stead. Lines end before ` | jq` where jq is not installed.
    """

    def __init__(self, folder: Path, names: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.folder, self._names = folder, dict(names)
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("SLOTSTREAM", "HF_"))}
        self._environment = {
            **kept,
            "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HOME": str(folder),
            "COLUMNS": "250",
            **environment,
        }
        self._program("slotstream", _SLOTSTREAM.format(python=sys.executable))
        self._program("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        self._program("ssh", '#!/bin/sh\nmkdir -p "$1" && cd "$1" || exit\nshift\nexec sh -c "$*"\n')

    def _program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, line: str) -> tuple[int, str]:
        """The exit code, and all that was written. At a terminal, where somebody has typed `y`."""
        keyboard, terminal = pty.openpty()
        os.write(keyboard, b"y\n")
        try:
            done = subprocess.run(
                ["bash", "-c", self._put_in(line)],
                cwd=self.folder,
                env=self._environment,
                stdin=terminal,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            os.close(keyboard)
            os.close(terminal)
        return done.returncode, done.stdout

    def run_until(self, line: str, said: str, number: int, meanwhile: Callable[[], None] = lambda: None) -> tuple[int, str]:
        """The same of a command that stays: once it has said that, or ended, it gets this signal. `meanwhile` runs before."""
        words = shlex.split(self._put_in(line), comments=True)
        environment = dict(self._environment)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        log = self.folder / "log"
        program = [shutil.which(words[0], path=environment["PATH"]) or words[0], *words[1:]]
        with (
            log.open("w") as out,
            subprocess.Popen(program, cwd=self.folder, env=environment, stdout=out, stderr=out) as process,
        ):
            try:
                wait_until(lambda: said in log.read_text() or process.poll() is not None, f"{said!r}: {line}")
                if process.poll() is None:
                    meanwhile()
                process.send_signal(number)
                return process.wait(60), log.read_text()
            finally:
                process.kill()

    def _put_in(self, line: str) -> str:
        for name, found in self._names.items():
            line = line.replace(name, found)
        return line if shutil.which("jq") else line.partition(" | jq")[0]
