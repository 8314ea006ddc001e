#!/usr/bin/env bash
# A run on YARN with its driver in the cluster, too: yarn.sh jobs/retrain.py --config churn.yaml [options of sparkdl run]
#
# --files brings the pipeline file to the driver; name the modules beside it in PY_FILES, with commas. More options of
# spark-submit go into SUBMIT_OPTIONS. `root` in the file is to be of HDFS or a bucket, and the nodes' Python to have sparkdl.
#
# maxAppAttempts=1: YARN would try again at once whatever ended the first attempt, a refusal as well; cron.sh tries again
# what is worth it. YARN makes 1 of every exit code: the run's own is in what spark-submit reports, and is this script's.
# SIGTERM to this script ends the application: without its client it would go on.
#
# What a run says lies in its driver's log: `yarn logs -applicationId ID`, the last line that begins with "sparkdl:". That
# of a run that came as far as its record is shown by `sparkdl status churn.yaml`, too.
set -u
job=$1
shift
config=
for ((n = 1; n < $#; n++)); do
    [ "${!n}" != --config ] || { next=$((n + 1)) && config=${!next}; }
done
[ -n "$config" ] || { echo "usage: yarn.sh jobs/retrain.py --config churn.yaml [options of sparkdl run]" && exit 1; }

report=$(mktemp)
application() { grep -o 'application_[0-9]*_[0-9]*' "$report" | tail -n 1; }
trap 'cat "$report"; rm -f "$report"' EXIT
trap 'kill "$client"; yarn application -kill "$(application)"; exit 143' TERM INT

spark-submit --master yarn --deploy-mode cluster --files "$config" ${PY_FILES:+--py-files "$PY_FILES"} \
    --conf spark.yarn.maxAppAttempts=1 --conf spark.dynamicAllocation.enabled=false ${SUBMIT_OPTIONS:-} \
    "$job" "${@/#"$config"/"$(basename "$config")"}" >"$report" 2>&1 &
client=$!
wait "$client"
code=$?
[ "$code" -ne 0 ] || exit 0
own=$(sed -n 's/.*User application exited with status \([0-9]*\).*/\1/p' "$report" | tail -n 1)
echo "the sentence that says why: yarn logs -applicationId $(application) | grep '^sparkdl:'" >>"$report"
exit "${own:-$code}"
