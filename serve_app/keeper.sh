#!/bin/sh
# Waits until the process that started it has ended (end of file), then ends what still runs in $FOLDER and removes it.
while read -r _; do :; done
[ -d "$FOLDER" ] || exit 0
running() {
  for entry in /proc/[0-9]*; do
    [ -O "$entry" ] && tr '\0' ' ' 2>/dev/null <"$entry/cmdline" | grep -qF "$FOLDER/" && echo "${entry#/proc/}"
  done
}
for number in TERM KILL; do
  left=20
  for pid in $(running); do kill -$number "$pid" 2>/dev/null; done
  while [ -n "$(running)" ] && [ $left -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
done
rm -rf "$FOLDER"
