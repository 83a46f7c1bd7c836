#!/bin/sh
# Waits until the process that started it has ended (end of file), then ends what still runs in $FOLDER and removes it.
# Ray's processes that have a title of their own (ray::...) name the folder in their environment only.
while read -r _; do :; done
[ -d "$FOLDER" ] || exit 0
running() {
  for entry in /proc/[0-9]*; do
    [ -O "$entry" ] || continue
    said=$(tr '\0' ' ' 2>/dev/null <"$entry/cmdline")
    case $said in ray::*) said=$(tr '\0' ' ' 2>/dev/null <"$entry/environ") ;; esac
    case $said in *"$FOLDER/"*) echo "${entry#/proc/}" ;; esac
  done
}
for number in TERM KILL; do
  left=20
  for pid in $(running); do kill -$number "$pid" 2>/dev/null; done
  while [ -n "$(running)" ] && [ $left -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
done
rm -rf "$FOLDER"
