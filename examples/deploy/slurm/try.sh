#!/bin/bash
# A real Slurm of one node: three jobs that share a mount, one of them cancelled. It writes to /etc/slurm, /etc/fusecache
# and /data: run it as root on a machine to throw away, with Debian's slurmctld, slurmd, slurm-client and munge.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
here=examples/deploy/slurm
JOB_USER=${JOB_USER:-nobody}

serve
bucket dataset 2048

mkdir -p /etc/fusecache /etc/slurm /run/munge /var/lib/slurm /var/spool/slurmd
sed -e "s|s3://my-bucket|s3://$BUCKET|" -e "s|https://ACCOUNT.*com|$AWS_ENDPOINT_URL|" $here/fusecache.toml >/etc/fusecache/slurm.toml
printf 'AWS_ACCESS_KEY_ID=key\nAWS_SECRET_ACCESS_KEY=secret\n' >/etc/fusecache/slurm.keys
chmod 600 /etc/fusecache/slurm.keys
install -m 755 $here/prolog.sh $here/epilog.sh /etc/slurm/
{
    cat $here/slurm.conf.part
    cat <<CONF
ClusterName=here
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
StateSaveLocation=/var/lib/slurm
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MailProg=/bin/true
MpiDefault=none
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES State=UP
CONF
} | sed 's/^KillWait=.*/KillWait=25/' >/etc/slurm/slurm.conf

chown -R munge: /run/munge
runuser -u munge -- munged --foreground & at_end "kill $!"
wait_for 240 "munge" munge --no-input --output=/dev/null
slurmctld -D >"$folder/slurmctld.log" 2>&1 & at_end "kill $!"
slurmd -D >"$folder/slurmd.log" 2>&1 & at_end "kill $!"
is_idle() { [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ]; }
wait_for 240 "an idle node" is_idle

as_user=(--parsable --uid="$JOB_USER" --gid="$(id -g "$JOB_USER")")
# submit RUN: a job that trains below /data/RUN, its step log in $folder/RUN; prints the job's number.
submit() {
    install -d -m 777 "$folder/$1"
    sbatch "${as_user[@]}" --chdir="$folder/$1" --output=out $here/train.sbatch \
        env HOME=/tmp PYTHONPATH="$PWD" "$PYTHON" -m torch.distributed.run --standalone -m examples.demo.train \
        --data /data/dataset --checkpoints "/data/$1" --final "/data/$1/final.pt" --log-dir "$folder/$1" "${@:2}"
}
state() { scontrol --oneliner show job "$1" | grep -o 'JobState=[A-Z]*\|ExitCode=[0-9:]*' | tr '\n' ' '; }
mounting() { pgrep --count --full "$1fusecache mount --foreground" || true; }
# shellcheck disable=SC2317
no_daemon() { [ "$(mounting '')" = 0 ]; }

# shellcheck disable=SC2317 # wait_for calls it
has_ended() { ! squeue --noheader --jobs="$1" 2>/dev/null | grep -q .; }
# shellcheck disable=SC2317
saved_or_over() { in_bucket "$2" || { has_ended "$1" && fail "job $1 has ended"; }; }

long=$(submit long --global-batch-size 1 --context 1024 --checkpoint-every 5)
wait_for 240 "the first checkpoint of job $long" saved_or_over "$long" long/step-0005/.metadata
short=$(submit short --global-batch-size 256)
wait_for 240 "the start of job $short" grep -q '"event": "step"' "$folder/short/train-rank0.jsonl"
check "two jobs, one mount" [ "$(grep -c fusecache /proc/self/mountinfo) $(mounting 'keeper.py .*')" = "1 1" ]
wait_for 240 "the end of job $short" has_ended "$short"
check "a job that succeeds: $(state "$short")" [ "$(state "$short")" = "JobState=COMPLETED ExitCode=0:0 " ]
check "final.pt is in the bucket" in_bucket short/final.pt
check "the other job still has its mount" mountpoint --quiet /data

began=$SECONDS
scancel "$long"
wait_for 240 "the end of job $long" has_ended "$long"
ok "scancel: over after $((SECONDS - began)) s, $(state "$long")"
sed 's/^/        | /' "$folder/long/out" | tail -n 5
check "all that the cancelled job saved is in the bucket" checkpoints_are_there "$folder/long"
wait_for 240 "the end of the mount" not_mounted /data
wait_for 60 "the end of the daemon" no_daemon

# A bucket that takes no uploads: the job and the epilog say what is missing, and the next job's end brings it.
mkdir -m 777 "$folder/late"
late=$(sbatch "${as_user[@]}" --chdir="$folder/late" --output=out $here/train.sbatch \
    bash -c "touch started; until [ -e held ]; do sleep 0.1; done; mkdir /data/late; echo weights >/data/late/final.pt")
wait_for 240 "the start of job $late" test -e "$folder/late/started"
bucket hold
touch "$folder/late/held"
wait_for 240 "the end of job $late" has_ended "$late"
check "a job whose files did not arrive: $(state "$late")" [ "$(state "$late")" = "JobState=FAILED ExitCode=1:0 " ]
check "it names them" grep "not in the bucket: late/final.pt" "$folder/late/out"
wait_for 240 "the words of the epilog" grep -q "job $late: .*" /var/log/fusecache-epilog.log
check "the epilog names them, too" grep "not in the bucket: late/final.pt" /var/log/fusecache-epilog.log
check "the node takes jobs" is_idle
bucket release
next=$(sbatch "${as_user[@]}" --chdir="$folder/late" --output=next $here/train.sbatch ls /data/late)
wait_for 240 "the end of job $next" has_ended "$next"
check "the next job finds the mount, and the file: $(state "$next")" grep -qx final.pt "$folder/late/next"
check "the late file is in the bucket" in_bucket late/final.pt
wait_for 240 "the end of the mount" not_mounted /data
ok "no mount is left"
not_here "several nodes, cgroups (proctrack/cgroup), job_container/tmpfs, and the end of a time limit"
