"""A client that is not ours: Python's standard library against a gateway, from the protocol's description alone.

Usage: contract.py URL [unverified]. Credentials: app `all`, secret `s3cret`. No agent is there.
"""
import http.client
import json
import ssl
import sys
import time
from urllib.parse import urlsplit

url = urlsplit(sys.argv[1])


def connect():
    if url.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(url.hostname, url.port, timeout=20, context=context)
    return http.client.HTTPConnection(url.hostname, url.port, timeout=20)


keep = connect()


def call(method, path, body, headers=None, esb=True):
    if esb:
        body = dict(body, bk_app_code="all", bk_app_secret="s3cret", bk_username="admin")
    keep.request(method, path, json.dumps(body), headers or {})
    answer = keep.getresponse()
    text = answer.read()
    assert answer.status == 200, (path, answer.status, text)
    envelope = json.loads(text)
    assert set(envelope) >= {"result", "code", "message", "data"}, envelope
    return envelope


def gse(name, body):
    return call("POST", "/api/c/compapi/v2/gse/%s/" % name, body)


host = {"ip": "10.9.0.1", "bk_cloud_id": 3, "bk_supplier_id": 1}
spec = {
    "identity": {"proc_name": "nginx", "setup_path": "/opt/nginx", "pid_path": "/run/nginx.pid", "user": "root"},
    "control": {"start_cmd": "./nginx", "stop_cmd": "./nginx -s stop"},
    "resource": {"cpu": 30.0, "mem": 10.0},
    "monitor_policy": {"auto_type": 1, "start_check_secs": 5, "crotab_rule": ""},
    "unknown": {"to": "everybody"},
}
meta = {"namespace": "gsekit", "name": "nginx", "labels": {"proc_id": 1024, "on": True}}
body = {"meta": meta, "hosts": [host], "spec": spec}

# The registry: a row for each instance, by cloud:supplier:ip:namespace:name.
key = "3:1:10.9.0.1:gsekit:nginx"
first = gse("register_proc_info", body)
assert first["result"] is True and first["code"] == 0, first
assert first["data"][key]["error_code"] == 0, first
assert gse("register_proc_info", body)["data"][key]["error_code"] == 850
assert gse("update_proc_info", body)["data"][key]["error_code"] == 0
assert call("PUT", "/procapi/v1/proc/procinfo", body)["data"][key]["error_code"] == 0

# Status, by name and page by page; a query by GET with a body.
row = gse("get_proc_status", body)["data"]["proc_infos"][0]
assert row["meta"]["labels"] == {"proc_id": "1024", "on": "true"}, row
assert (row["status"], row["pid"], row["host"]["bk_supplier_id"]) == (2, -1, 1), row
assert call("GET", "/procapi/v2/proc/status", body)["data"]["proc_infos"][0]["isauto"] is False
page = gse("sync_proc_status", {"meta": {"namespace": "gsekit"}, "page": {"start": 0, "limit": 1000}})
assert page["data"]["count"] == 1 and len(page["data"]["proc_infos"]) == 1, page

# 2.0 through an API gateway: agent ids, credentials in a header, a tenant.
header = {
    "X-Bkapi-Authorization": json.dumps({"bk_app_code": "all", "bk_app_secret": "s3cret", "bk_username": "x"}),
    "X-Bk-Tenant-Id": "default",
}
multi = {"proc_operate_req": [
    {"meta": {"namespace": "nodeman", "name": "a"}, "agent_id_list": ["3:10.9.0.2"], "op_type": 0, "spec": spec},
    {"meta": {"namespace": "nodeman", "name": "b"}, "agent_id_list": ["0200000000525400"], "op_type": 2, "spec": spec},
]}
task = call("POST", "/api/bk-gse/prod/api/v2/proc/operate_proc_multi", multi, header, esb=False)["data"]["task_id"]
begin = time.time()
while True:
    answer = call("POST", "/prod/api/v2/proc/get_proc_operate_result_v2", {"task_id": task}, header, esb=False)
    if answer["code"] == 1000115:
        continue
    assert answer["code"] == 0, answer
    rows = answer["data"]
    assert set(rows) == {"3:10.9.0.2:nodeman:a", "0200000000525400:nodeman:b"}, rows
    codes = {row["error_code"] for row in rows.values()}
    assert codes <= {115, 117}, rows
    if codes == {117}:
        break
    assert time.time() - begin < 15, "without an agent an operation ends within 10 s"
    time.sleep(0.1)
states = call("POST", "/prod/api/v2/cluster/list_agent_state", {"agent_id_list": ["3:10.9.0.2"]}, header, esb=False)
assert states["data"][0]["bk_agent_id"] == "3:10.9.0.2" and states["data"][0]["status_code"] != 2, states

# JOB: its own numbers, its own key, content as it is.
process = {"setup_path": "/opt/nginx", "proc_name": "nginx", "pid_path": "/run/nginx.pid", "proc_owner": "admin",
           "ip_list": [{"bk_cloud_id": 3, "ip": "10.9.0.1"}], "type": 1}
managed = call("POST", "/api/c/compapi/v2/jobv3/manage_proc/",
               {"bk_scope_type": "biz", "bk_scope_id": "2", "op_type": 1, "process_infos": [process]})
assert managed["data"]["bk_gse_taskid"], managed
result = call("POST", "/api/c/compapi/v2/job/get_proc_result/",
              {"bk_biz_id": 2, "bk_gse_taskid": managed["data"]["bk_gse_taskid"]})
assert list(result["data"]["result"]) == ["/opt/nginx/nginx:3:10.9.0.1"], result

# An error names the field, with HTTP status 200.
for wrong, says in [
    ({"hosts": [host], "spec": spec}, "meta.namespace"),
    ({"meta": meta, "spec": spec}, "hosts"),
    ({"meta": meta, "hosts": [host]}, "spec"),
    ({"meta": meta, "hosts": [host], "spec": {"identity": {}}}, "proc_name"),
    ({"meta": dict(meta, name="a:b"), "hosts": [host], "spec": spec}, "meta.name"),
]:
    answer = gse("register_proc_info", wrong)
    assert answer["result"] is False and answer["code"] != 0 and says in answer["message"], answer
assert gse("get_proc_operate_result", {"task_id": "GSETASK:20150723"})["result"] is False
odd = gse("operate_proc", dict(body, op_type=5))["data"]["task_id"]
assert gse("get_proc_operate_result", {"task_id": odd})["data"][key]["error_code"] == 832

assert call("DELETE", "/procapi/v1/proc/procinfo", {"meta": meta, "hosts": [host]})["data"][key]["error_code"] == 0
assert gse("get_proc_status", body)["data"]["proc_infos"] == []
print("contract kept")
