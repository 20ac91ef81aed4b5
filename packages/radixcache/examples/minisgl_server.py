# pyright: basic, reportMissingImports=false
"""Starts the server of mini-sglang with the prefix cache of pagewood-radixcache.

python minisgl_server.py --model Qwen/Qwen3-0.6B --cache-type pagewood
"""

from minisgl.server import launch_server

from pagewood.radixcache.integrations.minisgl import register

register()  # not below: the processes that mini-sglang spawns import this file

if __name__ == "__main__":
    launch_server()
