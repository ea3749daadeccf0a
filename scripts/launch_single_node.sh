#!/usr/bin/env bash
# Servers and trainer on one machine: vLLM on some of its GPUs (CUDA or ROCm), accelerate on the others.
#
#     scripts/launch_single_node.sh MODEL -- --dataset_name prompts.jsonl --reward_funcs contains_answer \
#         --output_dir out
#     scripts/launch_single_node.sh MODEL --server-gpus 2 --config scripts/accelerate/fsdp2.yaml -- ...
#     scripts/launch_single_node.sh MODEL -- ... -- --max-model-len 8192      # flags of vLLM
#
# Without GPUs both run on the CPU. The servers stop with the trainer, whose exit code is the script's.

set -euo pipefail
if ((BASH_VERSINFO[0] < 5)); then
    echo "launch_single_node.sh: error: this is bash $BASH_VERSION, and it needs 5 (macOS: brew install bash)" >&2
    exit 1
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'TEXT'
Usage: launch_single_node.sh MODEL [options] -- [arguments of scripts/grpo.py] [-- flags of vLLM]

  --server-gpus N   the first N GPUs for servers, the others for the trainer (default: half of them)
  --servers N       servers, each on an equal part of these GPUs (default: one for each GPU, if the weights fit on it)
  --processes N     processes of the trainer (default: one for each of its GPUs; 1 on a CPU)
  --config FILE     configuration of accelerate (default: ddp.yaml or cpu_ddp.yaml of scripts/accelerate)
  --port PORT       port of the first server, on 127.0.0.1; others have the next ones (default: 8000)
  --timeout SECONDS wait for the server to become ready (default: 1800)
  --log FILE        output of the first server, FILE.1 of the next (default: a new temporary file)

The trainer divides its requests among the servers. A server with several GPUs splits the model over them. With flags
such as -- --tensor-parallel-size 4 --data-parallel-size 2 of your own, one server gets all GPUs.

After a signal, the trainer has TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (default: 600) to write a checkpoint.

GPUs in use: CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES on AMD) if it is set, otherwise all.
TEXT
}

die() {
    echo "launch_single_node.sh: error: $*" >&2
    exit 1
}

whole_number() { # NAME VALUE
    [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 is '$2', but it must be a whole number of at least 1."
}

# Arguments

model='' server_gpus='' servers='' processes='' config='' port=8000 timeout=1800 log=''
while (($#)); do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --) break ;;
        --server-gpus | --servers | --processes | --config | --port | --timeout | --log)
            (($# > 1)) || die "$1 needs a value. See --help."
            name=${1#--}
            printf -v "${name//-/_}" %s "$2"
            shift 2
            ;;
        -*) die "$1 is not an option of this script. Arguments of scripts/grpo.py come after --. See --help." ;;
        *)
            [[ -z $model ]] || die "'$1' comes after the model, '$model'. Arguments of scripts/grpo.py come after --."
            model=$1
            shift
            ;;
    esac
done
[[ -n $model ]] || die "the model is left out. See --help."
trainer_args=() vllm_args=()
if (($#)); then
    shift
    while (($#)) && [[ $1 != -- ]]; do
        trainer_args+=("$1")
        shift
    done
    vllm_args=("${@:2}")
fi
whole_number --port "$port"
whole_number --timeout "$timeout"
[[ -z $log || (-d $(dirname -- "$log") && ! -d $log) ]] ||
    die "--log is '$log', but it must be a file in a folder that exists. Create the folder, or give another path."
for command in trl-april accelerate python3; do
    command -v "$command" >/dev/null || die "$command is not on the PATH. Activate the environment that has it."
done

# GPUs, and the vendor's variable that selects some of them

gpus=() variable='' chosen=''
if command -v nvidia-smi >/dev/null &&
    found=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+$'); then
    variable=CUDA_VISIBLE_DEVICES
    chosen=${CUDA_VISIBLE_DEVICES-$found}
elif command -v amd-smi >/dev/null && found=$(amd-smi list --csv 2>/dev/null | grep -oE '^[0-9]+'); then
    variable=HIP_VISIBLE_DEVICES
elif command -v rocm-smi >/dev/null && found=$(rocm-smi --showid --csv 2>/dev/null | grep -oP '^card\K[0-9]+'); then
    variable=HIP_VISIBLE_DEVICES
fi
if [[ $variable == HIP_VISIBLE_DEVICES ]]; then
    # ROCR_VISIBLE_DEVICES (set by Slurm) hides GPUs one level below: the visible ones count from 0.
    if [[ -n ${ROCR_VISIBLE_DEVICES-} ]]; then
        found=$(tr ',' '\n' <<<"$ROCR_VISIBLE_DEVICES" | awk '{ print NR - 1 }')
    fi
    chosen=${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-$found}} # AMD's runtime reads both
    unset CUDA_VISIBLE_DEVICES                                   # vLLM refuses two lists that differ
fi
mapfile -t gpus < <(tr -s ', \n' '\n' <<<"$chosen" | sed '/^$/d')

join() {
    local IFS=,
    echo "$*"
}

trainer_env=() parallel=()
if ((${#gpus[@]} == 0)); then
    echo "No GPU was found: server and trainer run on the CPU."
    [[ -z $server_gpus ]] || die "--server-gpus is $server_gpus, but no GPU was found. Leave it out for a CPU."
    trainer_env=(ACCELERATE_USE_CPU=true)
    trainer_args=(--bf16 false "${trainer_args[@]}") # TRL's default is true, which transformers refuses on a CPU
    processes=${processes:-1}
    config=${config:-$here/accelerate/cpu_ddp.yaml}
elif ((${#gpus[@]} == 1)); then
    die "one GPU was found (${gpus[0]}), but server and trainer need one each here. To share it, run" \
        "scripts/grpo.py alone: it starts the server beside the trainer."
else
    is_divided=false # by vLLM's flags
    [[ ! " ${vllm_args[*]} " =~ [-_]parallel[-_]size|\ -(tp|dp|dpl|pp|dcp|pcp)[\ =] ]] || is_divided=true
    server_gpus=${server_gpus:-$((${#gpus[@]} / 2))}
    whole_number --server-gpus "$server_gpus"
    ((server_gpus < ${#gpus[@]})) ||
        die "--server-gpus is $server_gpus of ${#gpus[@]}, but at least one must be left for the trainer. Lower it."
    if [[ -z $servers ]]; then
        servers=1
        if ((server_gpus > 1)) && [[ $is_divided == false ]]; then
            servers=$(env "$variable=$(join "${gpus[@]:0:server_gpus}")" \
                python3 -P -m trl_april.server.model_size "$model" "$server_gpus" "${vllm_args[@]}") ||
                die "how many servers fit on the GPUs is not known, for the reason above. Say it: --servers N."
        fi
    fi
    whole_number --servers "$servers"
    ((server_gpus % servers == 0)) ||
        die "--servers is $servers, which does not divide the $server_gpus GPUs of --server-gpus. Change one of them."
    trainer_env=("$variable=$(join "${gpus[@]:server_gpus}")")
    gpus_each=$((server_gpus / servers))
    ((gpus_each == 1)) || [[ $is_divided == true ]] || parallel=(--tensor-parallel-size "$gpus_each")
    processes=${processes:-$((${#gpus[@]} - server_gpus))}
    config=${config:-$here/accelerate/ddp.yaml}
    echo "Servers: $servers on $variable=$(join "${gpus[@]:0:server_gpus}"). Trainer: ${trainer_env[0]}."
fi
servers=${servers:-1}
whole_number --servers "$servers"
((${#gpus[@]} > 0 || servers == 1)) || die "--servers is $servers, but no GPU was found. Leave it out for a CPU."
whole_number --processes "$processes"
[[ -f $config ]] || die "--config is '$config', but there is no such file. See scripts/accelerate."

# Clean-up: stop the trainer first, then the servers

set -m # separate process groups: Ctrl-C reaches only this script, which stops them in order
server_pids=() trainer_pid=''

# torchrun's default of 30 s is too short for a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# shellcheck disable=SC2329  # called by the trap
alive() { # PID, or -PID for its process group. Zombies do not count: possibly nobody ever reaps them.
    kill -0 -- "$1" 2>/dev/null || return 1
    command -v ps >/dev/null || return 0
    ps -eo pid=,pgid=,stat= | awk -v id="$1" '($1 == id || -$2 == id) && $3 !~ /^Z/ { n++ } END { exit !n }'
}

# shellcheck disable=SC2329
end() { # PID, or -PID for its process group; SECONDS before SIGKILL
    kill -TERM -- "$1" 2>/dev/null || return 0
    for ((i = 0; i < 5 * $2; i++)); do
        alive "$1" || return 0
        sleep 0.2
    done
    kill -KILL -- "$1" 2>/dev/null || true
}

# shellcheck disable=SC2329
clean_up() {
    trap '' HUP INT TERM # a signal must not interrupt the clean-up
    # Workers have their own sessions, so torchrun must stop them.
    [[ -z $trainer_pid ]] || end "-$trainer_pid" $((TORCH_ELASTIC_SHUTDOWN_TIMEOUT + 20))
    for pid in "${server_pids[@]}"; do
        end "$pid" 20 & # it takes up to 10 to stop its children
    done
    wait
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# The servers

healthy() { # PORT
    python3 - "$1" 2>/dev/null <<'PYTHON'
import http.client, sys

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=5)
connection.request("GET", "/health")
sys.exit(connection.getresponse().status != 200)
PYTHON
}

for ((i = 0; i < servers; i++)); do
    ! healthy $((port + i)) || die "a server answers on port $((port + i)) already. Stop it, or choose another --port."
done
log=${log:-$(mktemp "${TMPDIR:-/tmp}/trl-april-server-XXXXXX.log")}
logs=() addresses=()
for ((i = 0; i < servers; i++)); do
    logs+=("$log")
    ((i == 0)) || logs[i]=$log.$i
    addresses+=("http://127.0.0.1:$((port + i))")
    server_env=()
    ((${#gpus[@]} == 0)) || server_env=("$variable=$(join "${gpus[@]:i*gpus_each:gpus_each}")")
    echo "Starting a server for $model on port $((port + i)). Its output: ${logs[i]}"
    env "${server_env[@]}" trl-april serve "$model" --port $((port + i)) "${parallel[@]}" "${vllm_args[@]}" \
        >"${logs[i]}" 2>&1 </dev/null &
    server_pids+=($!)
done
deadline=$((SECONDS + timeout))
for ((i = 0; i < servers; i++)); do
    until healthy $((port + i)); do
        if ! kill -0 "${server_pids[i]}" 2>/dev/null; then
            tail -n 30 "${logs[i]}" >&2
            die "the server ended while it was starting. Its whole output: ${logs[i]}. If it lacked memory, use more" \
                "GPUs for it: --servers 1."
        fi
        ((SECONDS < deadline)) || die "the server was not ready after $timeout s (--timeout). Its output: ${logs[i]}"
        sleep 0.5
    done
done

# The trainer

env "${trainer_env[@]}" accelerate launch --config_file "$config" --num_processes "$processes" "$here/grpo.py" \
    --model_name_or_path "$model" --vllm_server_base_url "$(join "${addresses[@]}")" "${trainer_args[@]}" </dev/null &
trainer_pid=$!
code=0
wait "$trainer_pid" || code=$?
exit "$code"
