#!/usr/bin/env bash
# One run for cron: cron.sh NAME COMMAND...
#
# Its output is kept in logs/NAME-DATE.log for KEEP_DAYS. What goes on standard output here is mailed by cron: the end of
# that log where a run failed, and nothing otherwise. Exit codes 2, 3, 5 and 30 (cluster, training, a store that did not
# answer, another run at work) are tried again after PAUSE, TRIES times in all: after 3 that helps a training, not a bundle
# that is damaged, which then costs the pauses before it is heard. A run that keeps meeting another one is
# silent until ALARM_HOURS have gone by since one ended well: a run that hangs, or a lease that nobody gives back, is heard.
# A run that takes longer than LIMIT is asked to end (SIGTERM, as Ctrl-C: it leaves a record and no lease) and killed ten
# minutes later; the next one goes on from the last step that was finished.
set -u
: "${LIMIT:=4h}" "${TRIES:=3}" "${PAUSE:=600}" "${KEEP_DAYS:=30}" "${ALARM_HOURS:=48}"

name=$1
shift
mkdir -p logs
log=logs/$name-$(date +%F).log
well=logs/$name.ended-well # its time is that of the last run that ended well, or of the first run of all
[ -e "$well" ] || touch "$well"
find logs -name "$name-*.log" -mtime "+$KEEP_DAYS" -delete

for ((try = 1; ; try++)); do
    echo "--- $(date '+%F %T') try $try: $*" >>"$log"
    # --foreground: the signal goes to the run alone, and not to its Java, which it needs to end well
    timeout --foreground --signal=TERM --kill-after=10m "$LIMIT" "$@" >>"$log" 2>&1 </dev/null
    code=$?
    echo "--- $(date '+%F %T') exit code $code" >>"$log"
    case $code in
        2 | 3 | 5 | 30) [ "$try" -lt "$TRIES" ] || break ;;
        *) break ;;
    esac
    sleep "$PAUSE"
done

case $code in
    0)
        touch "$well"
        exit 0
        ;;
    30)
        [ -n "$(find "$well" -mmin "+$((ALARM_HOURS * 60))")" ] || exit 0
        echo "$name: no run has ended well for $ALARM_HOURS hours, each meets another one: see who holds the lease, sparkdl status"
        ;;
    124 | 137) echo "$name: ended after $LIMIT, exit code $code" ;;
    *) echo "$name: exit code $code" ;;
esac
echo "the end of $PWD/$log:"
tail -n 40 "$log"
exit "$code"
