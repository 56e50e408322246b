#!/bin/sh
# A gate for any CI system: known findings are replayed, then new programs are tried for two minutes; what is new or expired is red.
#
#   TARGET=my_cache:TARGET BASELINE=known.toml sh gate.sh
#
#   TARGET    what to test: a target's name, or module:attribute
#   FAMILIES  families of models, with spaces between them; empty: all that the target runs
#   BASELINE  file of known findings; it is made, empty, when there is none
#   BUDGET    seconds of new programs
#   OUT       folder for the campaign, junit.xml and summary.md
#
# Exit status: 0 nothing new; 1 something new, or an entry that expired; 2 could not test; 64 a usage error.
set -u

TARGET=${TARGET:?name what to test, as in TARGET=my_cache:TARGET}
BASELINE=${BASELINE:-known.toml}
BUDGET=${BUDGET:-120}
OUT=${OUT:-runs}

[ -e "$BASELINE" ] || : > "$BASELINE"
set --
for family in ${FAMILIES:-}; do
  set -- "$@" --family "$family"
done

status=0
statedrift fuzz --target "$TARGET" "$@" --seconds "$BUDGET" --baseline "$BASELINE" --out "$OUT/gate" || status=$?
if [ -d "$OUT/gate" ]; then
  statedrift report "$OUT/gate" --junit "$OUT/junit.xml" --markdown "$OUT/summary.md" || [ "$status" -ne 0 ] || status=2
fi
exit "$status"
