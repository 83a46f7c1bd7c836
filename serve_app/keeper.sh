#!/bin/sh
# Waits until the process that started it has ended (end of file), then ends what still runs in $FOLDER and removes it.
# Ray's processes that have a title of their own (ray::...) name the folder in their environment only. Who has named it
# once is ended, also if it no longer does. One process a look: on a busy machine each takes its time to start.
while read -r _; do :; done
[ -d "$FOLDER" ] || exit 0
running() {
  for file in $(grep -lsF -e "$FOLDER/" /proc/[0-9]*/cmdline /proc/[0-9]*/environ); do
    entry=${file%/*}
    [ -O "$entry" ] || continue
    said=
    case $file in
      *environ)
        read -r said <"$entry/cmdline"
        case $said in ray::*) ;; *) continue ;; esac
        ;;
    esac
    echo "${entry#/proc/}"
  done
}
alive() {
  for pid in $1; do
    said=
    read -r said <"/proc/$pid/stat"
    case ${said##*) } in "" | Z* | X*) ;; *) echo "$pid" ;; esac
  done
}
known=
for number in TERM KILL; do
  left=20
  known=$(alive "$known $(running)")
  for pid in $known; do kill -$number "$pid" 2>/dev/null; done
  while [ -n "$known" ] && [ $left -gt 0 ]; do
    sleep 0.1
    left=$((left - 1))
    known=$(alive "$known $(running)")
  done
done
rm -rf "$FOLDER"
