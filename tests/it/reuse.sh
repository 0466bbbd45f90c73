#!/bin/bash
# In its own pid namespace: the pid of a process is reused by another process while no agent runs.
set -eu
abide=$1
echo 'apps: [{code: all, secret: s3cret}]' > apps.yaml
echo '* token' > tokens
echo token > token
"$abide" serve --listen 127.0.0.1:0 --data gateway --apps apps.yaml --agent-token-file tokens > ready 2> gateway.log &
until url=$(sed -n 's/^ready //p' ready) && [ -n "$url" ]; do sleep 0.05; done
join() {
    : > joined
    "$abide" agent --join "$url" --token-file token --data agent > joined 2>> agent.log &
    agent=$!
    until grep -q ready joined; do sleep 0.05; done
}
call() {
    python3 - "$url" "$1" "$2" <<'PYTHON'
import json, sys, urllib.request
body = dict(json.loads(sys.argv[3]), bk_app_code="all", bk_app_secret="s3cret")
request = urllib.request.Request(sys.argv[1] + "/api/c/compapi/v2/gse/" + sys.argv[2] + "/", json.dumps(body).encode())
print(json.dumps(json.load(urllib.request.urlopen(request))["data"]))
PYTHON
}
spec='"spec": {"identity": {"proc_name": "sleep", "setup_path": "/", "pid_path": "'$PWD'/p.pid", "user": "root"}, "control": {"start_cmd": "sleep 1000", "start_mode": "foreground"}, "monitor_policy": {"start_check_secs": 0}}'
target='"meta": {"namespace": "web", "name": "p"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]'
join
call operate_proc "{$target, \"op_type\": 0, $spec}" > task
until call get_proc_operate_result "$(cat task)" | grep -q '"error_code": 0'; do sleep 0.05; done
old=$(cat p.pid)
kill -9 "$agent"
wait "$agent" || true
kill -9 "$old"
while [ -d "/proc/$old" ]; do sleep 0.05; done
# The next process gets the very same pid.
for _ in $(seq 50); do
    echo $((old - 1)) > /proc/sys/kernel/ns_last_pid
    sleep 2000 &
    foreign=$!
    [ "$foreign" = "$old" ] && break
    kill "$foreign"
done
[ "$foreign" = "$old" ] || { echo "the pid could not be had again"; exit 1; }
join
# The agent relaunches the supervised process, and stops that one, not the other. Its pid file is replaced in between.
until new=$(cat p.pid 2> /dev/null) && [ -n "$new" ] && [ "$new" != "$old" ]; do sleep 0.05; done
[ -d "/proc/$new" ]
call operate_proc "{$target, \"op_type\": 1, $spec}" > task
while [ -d "/proc/$new" ]; do sleep 0.05; done
[ -d "/proc/$foreign" ] && echo untouched
