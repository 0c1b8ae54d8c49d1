#!/usr/bin/env bash
# Parameter servers and workers on several hosts, each task by ssh; all end with the first failure.
#
#   launch/ps_cluster.sh PS_HOST,... WORKER_HOST,... CONFIG [section.key=value ...]
#   PORT=4000 launch/ps_cluster.sh node1,node2 node1,node2,node3 configs/ps.yaml
#
# A host may be named several times: the ports count up from PORT (3333), one for each task. The
# environment must be activated; the hosts have it, and the current folder, at the same place, and
# ssh without a password. SIGTERM, SIGUSR1 and Ctrl-C are passed on: a checkpoint is saved first.
set -euo pipefail

case ${1:-} in
  -h | --help | '')
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
fail() { # what, rule, received, do
  printf 'error: %s\n  rule:     %s\n  received: %s\n  do:       %s\n' "$@" >&2
  exit 2
}
[ "$#" -ge 3 ] || fail "an argument is missing" \
  "hosts of ps, hosts of workers, and a configuration" "$*" "see $0 --help"
for list in "$1" "$2"; do
  [[ $list =~ ^[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*$ ]] || fail "these are no hosts" "HOST,..." \
    "$list" "for example node1,node2; a host that takes two tasks is named twice"
done

IFS=, read -r -a ps <<<"$1"
IFS=, read -r -a workers <<<"$2"
shift 2
port=${PORT:-3333}
names=() hosts=() addresses=()
add() { # role host...
  local role=$1 index=0 host
  shift
  for host in "$@"; do
    names+=("$role $index") hosts+=("$host") addresses+=("$host:$port")
    index=$((index + 1)) port=$((port + 1))
  done
}
add ps "${ps[@]}"
add worker "${workers[@]}"
join() {
  local IFS=,
  echo "$*"
}
cluster="{ps: [$(join "${addresses[@]:0:${#ps[@]}}")], worker: [$(join "${addresses[@]:${#ps[@]}}")]}"

# ssh passes no signals on. hvps.guard, under which a task runs, reads them as lines of its input,
# and ends the task with that input: when this script, or the connection, is gone.
pids=() inputs=()
stop() { # number of a signal
  local input
  for input in "${inputs[@]}"; do
    echo "$1" >&"$input" || true
  done
}
stopping=
trap 'stopping=1; stop 15' TERM USR1
trap 'stopping=1; stop 2' INT
trap '' PIPE

# Of this environment the tasks get what may matter to them, and nothing that belongs to one host.
settings=()
for name in $(compgen -e); do
  case $name in
    TF_CONFIG | HOROVOD_RANK | HOROVOD_SIZE) ;;
    PATH | PYTHONPATH | LD_LIBRARY_PATH | LANG | HVPS_* | NCCL_* | TF_* | XLA_* | KERAS_* | OMP_*)
      settings+=("$name=${!name}")
      ;;
  esac
done

pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
for i in "${!names[@]}"; do
  read -r role index <<<"${names[$i]}"
  # null first: the cluster that the file may have is not to be merged with this one.
  command=(env "${settings[@]}" python -m hvps.guard python -m hvps.train "$@"
    backend.cluster=null "backend.cluster=$cluster" --role "$role" --index "$index")
  mkfifo "$pipes/$i"
  (
    trap '' INT USR1 TERM
    # Else the others' input would not end with this script.
    for other in "${inputs[@]}"; do exec {other}>&-; done
    ssh -o BatchMode=yes -o ConnectTimeout=8 "${hosts[$i]}" \
      "cd $(printf %q "$PWD") && exec $(printf '%q ' "${command[@]}")" <"$pipes/$i" 2>&1 |
      sed -u "s/^/[${names[$i]}] /"
    exit "${PIPESTATUS[0]}"
  ) &
  pids+=($!)
  exec {input}>"$pipes/$i"
  inputs+=("$input")
done

# The first failure ends the others; a signal interrupts `wait`, which then goes on.
status=0
left=("${pids[@]}")
while [ "${#left[@]}" -gt 0 ]; do
  code=0
  wait -n -p ended "${left[@]}" || code=$?
  if [ -z "${ended:-}" ]; then
    continue # a signal came
  fi
  remaining=()
  for pid in "${left[@]}"; do
    [ "$pid" = "$ended" ] || remaining+=("$pid")
  done
  left=("${remaining[@]}")
  if [ "$code" -ne 0 ] && [ "$status" -eq 0 ]; then
    status=$code
    [ -z "$stopping" ] || continue # asked for: all are stopping
    for i in "${!pids[@]}"; do
      [ "${pids[$i]}" != "$ended" ] || echo "error: ${names[$i]} ended with exit code $code" >&2
    done
    stop 15
  fi
done
exit "$status"
