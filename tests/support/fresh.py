"""Processes that have imported torch and nothing of this package: forks of a server.

A Python that imports torch first takes 2 s of a core for each.
"""

import json
import subprocess
import sys

# Of what dynamo needs, it has what takes longest; no collection looks at that.
_SERVER = """
import gc, json, os, sys, tempfile, traceback, torch, sympy, torch.distributed.fsdp
assert not {"torch._dynamo", "overflow_fast"} & sys.modules.keys()
gc.collect()
gc.freeze()
for line in sys.stdin:
    cwd, code, *sys.argv[1:] = json.loads(line)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            status = 0
            try:
                os.chdir(cwd)
                exec(code, {"__name__": "__main__"})
            except BaseException:
                status = traceback.print_exc() or 1
            sys.stdout.flush()
            os._exit(status)
        status = os.waitpid(child, 0)[1]
        out.seek(0), err.seek(0)
        print(json.dumps([status, out.read(), err.read()]), flush=True)
"""


class Fresh:
    """Runs code in a process of its own, as `python -c` would with torch imported."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, code, *arguments, cwd="."):
        """Returns what the code prints; it raises nothing."""
        request = json.dumps([str(cwd), code, *map(str, arguments)])
        print(request, file=self._server.stdin, flush=True)
        status, out, err = json.loads(self._server.stdout.readline())
        assert status == 0, err
        return out

    def close(self):
        self._server.communicate()
