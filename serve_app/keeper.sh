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
# Of numbers, with or without a start, those of living processes, each with when it was started: another process may
# have the number by now.
alive() {
  seen=' '
  for one in $1; do
    said=
    read -r said <"/proc/${one%%:*}/stat"
    case ${said##*) } in "" | Z* | X*) continue ;; esac
    set -- ${said##*) }
    id="${one%%:*}:${20}"
    case $one in *:*) [ "$one" = "$id" ] || continue ;; esac
    case $seen in *" $id "*) continue ;; esac
    seen="$seen$id "
    echo "$id"
  done
}
clock() { read -r now _ </proc/uptime; now=${now%.*}; }
known=
# By the clock and not by looks, of which each takes long where the machine is busy.
for step in TERM:2 KILL:5; do
  clock
  until=$((now + ${step#*:}))
  told=' '
  while known=$(alive "$known $(running)") && [ -n "$known" ]; do
    for one in $known; do
      case $told in *" $one "*) ;; *) kill "-${step%:*}" "${one%%:*}" 2>/dev/null ;; esac
    done
    set -- $known
    told=" $* "
    clock
    [ "$now" -lt "$until" ] || break
    sleep 0.1
  done
done
rm -rf "$FOLDER"
