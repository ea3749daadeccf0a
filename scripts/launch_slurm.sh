#!/usr/bin/env bash
#SBATCH --job-name=grpo
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#
# Server and trainer on the nodes of a Slurm job: vLLM on the last node (or the last few), accelerate on the others.
# Submit it from the root of the repository, in the environment of the training, with any option of sbatch:
#
#     sbatch scripts/launch_slurm.sh MODEL -- --dataset_name /shared/prompts.jsonl --reward_funcs contains_answer \
#         --output_dir /shared/out
#     sbatch --nodes=6 scripts/launch_slurm.sh MODEL --server-nodes 2 --config scripts/accelerate/zero3.yaml -- ...
#     sbatch ... scripts/launch_slurm.sh MODEL -- ... -- --max-model-len 8192       # flags of vLLM
#
# A server node has one server per GPU if the weights fit on it, and fewer with several GPUs each otherwise. The trainer
# divides its requests among all of them. With parallelism of your own there is one server, which gets all server nodes
# (over Ray, if there are several; `pip install ray`). For a model too large for one node, let one copy span them:
# -- --tensor-parallel-size 16 --distributed-executor-backend ray
#
# Weights go through NCCL (RCCL on AMD). Without a network for it, use --weight_sync filesystem and --weight_sync_dir
# with a folder that all nodes share.
#
# The server listens on the cluster's network. VLLM_API_KEY, drawn for the job unless it is set, guards the endpoints
# that generate. It guards neither Ray nor vLLM's development endpoints, which weight syncs need and which run commands
# for everyone who reaches them. Run this only where the compute nodes are closed to strangers.

set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: sbatch [options of sbatch] launch_slurm.sh MODEL [options] -- [arguments of scripts/grpo.py] [-- flags of vLLM]

  --server-nodes N      nodes of the servers, the last ones of the job (default: 1)
  --servers N           servers on each of them (default: one for each GPU, if the weights fit on it)
  --gpus-per-node N     GPUs used on each node (default: all that Slurm allocated)
  --server-address IP   address that the servers bind to, on several nodes one for each, with commas (default: those of
                        the nodes, as the first node sees them)
  --config FILE         configuration of accelerate (default: scripts/accelerate/ddp.yaml)
  --port PORT           port of the first server of a node; others have the next ones (default: 8000)
  --timeout SECONDS     wait for the servers to become ready (default: 3600)

A server with several GPUs splits the model over them. With flags such as -- --tensor-parallel-size 4
--data-parallel-size 2 of your own, one server gets all GPUs (on two server nodes: --data-parallel-size 4
--data-parallel-size-local 2).

After a signal, the trainer has TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (default: 600) to write a checkpoint.
Pass --signal=B:TERM@600 to sbatch, so that Slurm signals this script in time.
TEXT
}

die() {
    echo "launch_slurm.sh: error: $*" >&2
    exit 1
}

whole_number() { # NAME VALUE
    [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 is '$2', but it must be a whole number of at least 1."
}

# Arguments

model='' server_nodes=1 servers='' gpus_per_node=${SLURM_GPUS_ON_NODE-} server_address='' port=8000 timeout=3600
config=scripts/accelerate/ddp.yaml
while (($#)); do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --) break ;;
        --server-nodes | --servers | --gpus-per-node | --server-address | --config | --port | --timeout)
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
[[ -n ${SLURM_JOB_NODELIST-} ]] || die "SLURM_JOB_NODELIST is not set: this is no Slurm job. Start it by sbatch."
[[ -n $gpus_per_node ]] || die "Slurm gave no GPUs. Pass --gpus-per-node=N to sbatch, or to this script."
whole_number --server-nodes "$server_nodes"
whole_number --gpus-per-node "$gpus_per_node"
whole_number --port "$port"
whole_number --timeout "$timeout"
# sbatch runs a copy of this script, from a folder of its own.
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -f scripts/grpo.py ]] || die "there is no scripts/grpo.py in $PWD. Submit from the root of the repository."
[[ -f $config ]] || die "--config is '$config', but there is no such file in $PWD. See scripts/accelerate."
if [[ " ${trainer_args[*]} " =~ \ --weight[_-]sync[\ =]filesystem\  ]] &&
    [[ ! " ${trainer_args[*]} " =~ \ --weight[_-]sync[_-]dir[\ =] ]]; then
    die "--weight_sync is filesystem without --weight_sync_dir, and the server runs on another node. Name a folder" \
        "that all nodes share."
fi
is_one=false # one server, on all server nodes
[[ ! " ${vllm_args[*]} " =~ [-_]parallel[-_]size|\ -(tp|dp|dpl|pp|dcp|pcp)[\ =] ]] || is_one=true
commands=(trl-april accelerate python3 srun scontrol)
[[ $is_one == false || $server_nodes == 1 ]] || commands+=(ray)
for command in "${commands[@]}"; do
    command -v "$command" >/dev/null || die "$command is not on the PATH. Submit from the environment that has it."
done

# Nodes

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainer_nodes=$((${#nodes[@]} - server_nodes))
((trainer_nodes > 0)) ||
    die "the job has ${#nodes[@]} nodes, and --server-nodes is $server_nodes; at least one must be left for the" \
        "trainer. Ask sbatch for more --nodes."
join() {
    local IFS=,
    echo "$*"
}
trainer_list=$(join "${nodes[@]:0:trainer_nodes}")
server_list=$(join "${nodes[@]:trainer_nodes}")
mapfile -t addresses < <(tr ',' '\n' <<<"$server_address" | sed '/^$/d')
if ((${#addresses[@]} == 0)); then
    # Asked here, on another node: on its own node a name often stands for the loopback.
    for node in "${nodes[@]:trainer_nodes}"; do
        address=$(getent ahostsv4 "$node" | awk 'NR == 1 { print $1 }') || true
        [[ -n $address && $address != 127.* ]] ||
            die "$node resolves to '$address', where other nodes do not reach it. Pass --server-address."
        addresses+=("$address")
    done
fi
if [[ $is_one == true ]]; then
    [[ -z $servers ]] || die "--servers is $servers, but vLLM's flags make one server. Leave one of them out."
    servers=1 addresses=("${addresses[0]}")
else
    ((${#addresses[@]} == server_nodes)) ||
        die "--server-address has ${#addresses[@]} addresses for $server_nodes server nodes. Give one for each."
    if [[ -z $servers ]] && ((gpus_per_node == 1)); then
        servers=1
    elif [[ -z $servers ]]; then # asked on this node, which has the same GPUs
        servers=$(python3 -P -m trl_april.server.model_size "$model" "$gpus_per_node" "${vllm_args[@]}") ||
            die "how many servers fit on the GPUs is not known, for the reason above. Say it: --servers N."
    fi
    whole_number --servers "$servers"
    ((gpus_per_node % servers == 0)) ||
        die "--servers is $servers, which does not divide the $gpus_per_node GPUs of a node. Change one of them."
fi
urls=() pairs=() # addresses of all servers
for address in "${addresses[@]}"; do
    for ((i = 0; i < servers; i++)); do
        pairs+=("$address $((port + i))")
        [[ $address == *:* ]] && url="[$address]" || url=$address # IPv6
        urls+=("http://$url:$((port + i))")
    done
done
echo "Servers on $server_list: $(join "${urls[@]}"). Trainer on $trainer_list."

if [[ -z ${VLLM_API_KEY-} ]]; then
    VLLM_API_KEY=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')
fi
export VLLM_API_KEY # srun hands it on; on a command line every user of the node could read it

# --export: the environment of this script, whatever sbatch was told. --cpu-bind: one task per node starts all
# processes there, and must not be tied to one core.
step=(srun --export=ALL --cpu-bind=none --ntasks-per-node=1 --kill-on-bad-exit=1)

# Clean-up: stop the trainer first, then the server

server_pid='' trainer_pid=''

# On SIGTERM srun kills its step at once. It forwards SIGUSR1 to every process on the nodes: only this shell handles it,
# and stops its command.
# shellcheck disable=SC2016  # expanded on the node
on_node='
    trap "kill -TERM \$pid" USR1
    trap : TERM # Slurm sends its SIGTERM to all processes, including the command
    (trap "" USR1; exec "$@") &
    pid=$!
    while wait "$pid"; kill -0 "$pid" 2>/dev/null; do :; done
    wait "$pid"
'

# torchrun's default of 30 s is too short for a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# shellcheck disable=SC2329  # called by the trap
clean_up() {
    trap '' INT TERM # a signal must not interrupt the clean-up
    for pid in $trainer_pid $server_pid; do
        kill -USR1 "$pid" 2>/dev/null || continue
        wait "$pid" || true
    done
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The server

# The servers of a node, each with the next of its GPUs. All stop if one does.
# shellcheck disable=SC2016  # expanded on the node
servers_of_node='
    IFS=, read -ra addresses <<<"$1"
    servers=$2 each=$3 port=$4
    shift 4
    # Below ROCR_VISIBLE_DEVICES, which Slurm sets for AMD, GPUs count from 0.
    visible=${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-}}
    [[ -z ${ROCR_VISIBLE_DEVICES-} && -n $visible ]] || visible=$(seq -s , 0 $((servers * each - 1)))
    IFS=, read -ra gpus <<<"$visible"
    trap : TERM
    pids=()
    for ((i = 0; i < servers; i++)); do
        share=$(IFS=,; echo "${gpus[*]:i*each:each}")
        CUDA_VISIBLE_DEVICES=$share HIP_VISIBLE_DEVICES=$share \
            "$@" --host "${addresses[SLURM_PROCID]}" --port $((port + i)) &
        pids+=($!)
    done
    code=0
    wait -n || code=$?
    kill -TERM "${pids[@]}" 2>/dev/null
    while wait; [[ -n $(jobs -pr) ]]; do :; done
    exit $code
'
if [[ $is_one == true ]]; then
    serve=(trl-april serve "$model" --host "${addresses[0]}" --port "$port")
    # Ray joins the nodes, runs the command on the first one, and stops with it.
    url=${urls[0]#http://}
    ((server_nodes == 1)) || serve=(
        ray symmetric-run --address "${url%:*}:6379" --min-nodes "$server_nodes" --num-gpus "$gpus_per_node" --
        "${serve[@]}" --data-parallel-backend ray --data-parallel-address "${addresses[0]}"
    )
else
    gpus_each=$((gpus_per_node / servers))
    serve=(bash -c "$servers_of_node" servers "$(join "${addresses[@]}")" "$servers" "$gpus_each" "$port")
    serve+=(trl-april serve "$model")
    ((gpus_each == 1)) || serve+=(--tensor-parallel-size "$gpus_each")
fi
log="${SLURM_JOB_NAME:-grpo}-${SLURM_JOB_ID:-0}-server.log"
"${step[@]}" --nodes="$server_nodes" --ntasks="$server_nodes" --nodelist="$server_list" \
    bash -c "$on_node" on_node "${serve[@]}" "${vllm_args[@]}" >"$log" 2>&1 </dev/null &
server_pid=$!

healthy() { # ADDRESS PORT
    python3 - "$1" "$2" 2>/dev/null <<'PYTHON'
import http.client, sys

connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=5)
connection.request("GET", "/health")
sys.exit(connection.getresponse().status != 200)
PYTHON
}

deadline=$((SECONDS + timeout))
for pair in "${pairs[@]}"; do
    # shellcheck disable=SC2086  # address and port
    until healthy $pair; do
        if ! kill -0 "$server_pid" 2>/dev/null; then
            tail -n 30 "$log" >&2
            die "the server ended while it was starting. Its whole output: $PWD/$log. If it lacked memory, use more" \
                "GPUs for it: --servers 1."
        fi
        ((SECONDS < deadline)) || die "the server was not ready after $timeout s (--timeout). Its output: $PWD/$log"
        sleep 1
    done
done

# The trainer: one accelerate per node, with its rank from Slurm

# shellcheck disable=SC2016  # expanded on the node
"${step[@]}" --nodes="$trainer_nodes" --ntasks="$trainer_nodes" --nodelist="$trainer_list" \
    bash -c "$on_node" on_node bash -c 'exec accelerate launch --machine_rank "$SLURM_PROCID" "$@"' accelerate \
    --config_file "$config" --num_machines "$trainer_nodes" --num_processes $((trainer_nodes * gpus_per_node)) \
    --main_process_ip "${nodes[0]}" --main_process_port 29500 --rdzv_backend static --same_network \
    scripts/grpo.py --model_name_or_path "$model" --vllm_server_base_url "$(join "${urls[@]}")" \
    "${trainer_args[@]}" </dev/null &
trainer_pid=$!
code=0
wait "$trainer_pid" || code=$?
exit "$code"
