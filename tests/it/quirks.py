"""Every quirk of the protocol that can be seen without an agent, one small function each, and bodies meant to hurt.

Usage: quirks.py URL. Credentials: app `all`, secret `s3cret`, for any namespace. No agent is there.
What is expected comes from the protocol's description and its example documents, never from a gateway's habits.
A quirk that yields waits for a task, and gets its rows when none of them is still running (115); all share one wait.
"""
import copy
import http.client
import inspect
import itertools
import json
import ssl
import sys
import time
from urllib.parse import urlsplit

URL = urlsplit(sys.argv[1])
CREDENTIALS = {"bk_app_code": "all", "bk_app_secret": "s3cret", "bk_username": "admin"}
HEADER = {"X-Bkapi-Authorization": json.dumps(CREDENTIALS)}
ESB, PREFIXES, SLASHES = "/api/c/compapi/v2/", ["", "/prod", "/api/bk-gse/prod"], ["/", ""]
OPS, VERBS = [0, 1, 2, 3, 4, 7, 8, 9], ["start", "stop", "restart", "reload", "kill", "version", "health"]
RUN, NUMBERS, GONE = int(time.time()) % 1000000, itertools.count(1), object()
BUSINESS, PATIENCE = 1000000 + RUN, 10.5  # 10 s, and a poll's time
if URL.scheme == "https":
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    keep = http.client.HTTPSConnection(URL.hostname, URL.port, timeout=30, context=context)
else:
    keep = http.client.HTTPConnection(URL.hostname, URL.port, timeout=30)

def send(method, path, body=b"", headers=HEADER):
    """One request: HTTP's status, and the text. A connection closed without an answer, or 30 s, is an exception."""
    try:
        keep.request(method, path, body, headers)
        answer = keep.getresponse()
        return answer.status, answer.read()
    except Exception:
        keep.close()
        raise

def envelope(text):
    answer = json.loads(text.decode("utf-8"))
    assert set(answer) >= {"result", "code", "message", "data"} and type(answer["message"]) is str, answer
    assert type(answer["code"]) is int and answer["result"] is (answer["code"] == 0), answer
    return answer

def call(method, path, body, headers=None, auth="body"):
    body = dict(body, **CREDENTIALS) if auth == "body" else body
    headers = dict(headers or {}, **(HEADER if auth == "header" else {}))
    status, text = send(method, path, json.dumps(body).encode(), headers)
    assert status == 200, (method, path, status, text[:300])
    return envelope(text)

def gse(name, body, headers=None):
    return call("POST", ESB + "gse/%s/" % name, body, headers)

def native(name, body, slash=""):
    return call(NATIVE[name][0], "/procapi/" + NATIVE[name][1] + slash, body)

def apigw(name, body, prefix="", group="proc"):
    return call("POST", "%s/api/v2/%s/%s" % (prefix, group, name), body, auth="header")

def job(name, body, version="job", headers=None):
    return call("POST", ESB + "%s/%s/" % (version, name), body, headers)

def good(answer):
    assert answer["code"] == 0, answer
    return answer["data"]

def bad(answer, what=""):
    """Refused as a whole, or in every row; the rows of refused items of a batch are in the result of its task."""
    data = answer["data"] or {}
    if answer["code"] == 0 and "task_id" in data:
        rows = good(gse("get_proc_operate_result_v2", data)).values()
        refused = all(row["error_code"] == 1900400 and row["error_msg"] for row in rows)
    elif answer["code"] == 0 and "bk_gse_taskid" in data:
        rows = good(job("get_proc_result", dict(data, bk_biz_id=2)))["result"].values()
        refused = all(row["error_code"] == 1900400 and row["error_msg"] for row in rows)
    else:
        rows = [row for row in data.values() if isinstance(row, dict)]
        refused = all(row["error_code"] for row in rows)
    assert answer["code"] != 0 or rows and refused, (what, answer, rows)

def rows_are(rows, want, what=""):
    """The codes, by key."""
    assert all(type(row["error_msg"]) is str and "content" in row for row in rows.values()), rows
    got = {key: row["error_code"] for key, row in rows.items()}
    assert got == want, "%s got %.900s, not %.900s" % (what, got, want)

def v1(data):
    return lambda: gse("get_proc_operate_result", {"task_id": data["task_id"]})

def v2(data):
    return lambda: gse("get_proc_operate_result_v2", {"task_id": data["task_id"]})

def of_job(data):
    def ask():
        answer = job("get_proc_result", {"bk_biz_id": 2, "bk_gse_taskid": data["bk_gse_taskid"]})
        return dict(answer, data=(answer["data"] or {}).get("result"))
    return ask

def place():
    """A namespace and an address that nothing else uses."""
    number = next(NUMBERS)
    return "q%d-%d" % (RUN, number), "10.%d.%d.1" % (RUN % 80, number)

def key(ns, ip, name="web", supplier="5:"):
    return "3:%s%s:%s:%s" % (supplier, ip, ns, name)

def spec(ns, name="web", **more):
    identity = {"proc_name": name, "setup_path": "/opt/" + ns, "pid_path": "/run/%s.pid" % ns, "user": "root"}
    return dict({"identity": identity, "control": {"start_cmd": "./run"}, "monitor_policy": {"auto_type": 1}}, **more)

def bare(ns, *ips, name="web", **more):
    hosts = [{"ip": ip, "bk_cloud_id": 3, "bk_supplier_id": 5} for ip in ips]
    return dict({"meta": {"namespace": ns, "name": name, "labels": {"a": "b"}}, "hosts": hosts}, **more)

def full(ns, *ips, name="web", **more):
    return bare(ns, *ips, name=name, **dict({"spec": spec(ns, name)}, **more))

def process(ns, ip, **more):
    return dict({"proc_name": "web", "proc_owner": "root", "setup_path": "/opt/" + ns, "pid_path": "/run/x.pid",
                 "type": 1, "ip_list": [{"bk_cloud_id": 3, "ip": ip}]}, **more)

def managed(ns, ip, op=1, **more):
    return {"bk_biz_id": 2, "op_type": op, "process_infos": [process(ns, ip, **more)]}

def but(value, *path, new=GONE):
    """A body with something else at one place, or nothing."""
    value = at = copy.deepcopy(value)
    for step in path[:-1]:
        at = at[step]
    if new is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return value

def infos(ns, *ips, call="get_proc_status", name="web"):
    return good(gse(call, bare(ns, *ips, name=name)))["proc_infos"]

def absent(rows):
    assert all((row["flag"], row["status"]) == (0, 0) for row in rows), rows

def ipv6_hosts(*ips):
    ns, _ = place()
    rows_are(good(gse("register_proc_info", full(ns, *ips))), {key(ns, ip): 0 for ip in ips})
    rows = yield v2(good(gse("operate_proc_v2", full(ns, *ips, op_type=2))))
    rows_are(rows, {key(ns, ip, supplier=""): 117 for ip in ips})

def job_named(ns, ip, processes, want):
    """A JOB task is a GSE task, so its GSE keys tell which instances were meant."""
    good(gse("register_proc_info", full(ns, ip, name="alias", spec=spec(ns))))
    body = {"bk_biz_id": BUSINESS, "op_type": 2, "process_infos": processes}
    rows = yield v2({"task_id": good(job("operate_process", body))["bk_gse_taskid"]})
    rows_are(rows, {"3:%s:%s" % (ip, one): 117 for one in want})

NATIVE = {
    "register_proc_info": ("POST", "v1/proc/procinfo"), "update_proc_info": ("PUT", "v1/proc/procinfo"),
    "unregister_proc_info": ("DELETE", "v1/proc/procinfo"), "operate_proc": ("POST", "v1/proc/operate"),
    "operate_proc_v2": ("POST", "v2/proc/operate"), "operate_proc_multi": ("POST", "v2/proc/multioperate"),
    "get_proc_operate_result": ("GET", "v1/proc/operate"), "get_proc_operate_result_v2": ("GET", "v2/proc/operate"),
    "get_proc_status": ("GET", "v1/proc/status"), "get_proc_status_v2": ("GET", "v2/proc/status"),
    "sync_proc_status": ("GET", "v1/proc/syncstatus"), "set_process_group_info": ("POST", "v1/proc/groupinfo"),
    "get_process_group_info": ("GET", "v1/proc/groupinfo")}
POOL = {"cpu_pool_limit": 50, "mem_pool_limit": 40, "cpu_pool_weight": 0, "mem_pool_weight": 1}

def calls():
    """A right body for every GSE call that has a native address, in an order in which each succeeds."""
    ns, ip = place()
    task = good(gse("operate_proc", full(ns, ip, op_type=2)))
    group = {"meta": {"namespace": ns}, "hosts": bare(ns, ip)["hosts"]}
    return {
        "register_proc_info": full(ns, ip), "update_proc_info": full(ns, ip), "operate_proc": bare(ns, ip, op_type=2),
        "operate_proc_v2": full(ns, ip, op_type=2), "get_proc_operate_result": task, "get_proc_operate_result_v2": task,
        "operate_proc_multi": {"proc_operate_req": [full(ns, ip, op_type=2)]}, "get_proc_status": bare(ns, ip),
        "get_proc_status_v2": bare(ns, ip), "get_process_group_info": group,
        "sync_proc_status": {"meta": {"namespace": ns}, "page": {"start": 0, "limit": 1000}},
        "set_process_group_info": dict(group, spec={"process_group": [{"id": "g1", "resource": POOL}]}),
        "unregister_proc_info": bare(ns, ip)}.items()

def job_calls():
    ns, ip = place()
    task = good(job("operate_process", managed(ns, ip, 2)))
    return {"manage_proc": managed(ns, ip), "manage_process": managed(ns, ip, 2),
            "operate_process": managed(ns, ip, 2), "get_proc_result": dict(task, bk_biz_id=2)}.items()

ACCEPT, REFUSE, EITHER = "accepted", "refused", "answered"
NEEDED = {"meta", "namespace", "hosts", "ip", "identity", "proc_name", "task_id", "bk_gse_taskid", "process_infos",
          "ip_list", "proc_operate_req", "agent_id_list"}
MANY = ["10.%d.%d.%d" % (90 + n // 62500, n // 250 % 250, n % 250) for n in range(20000)]

def places(value, path=()):
    """Every place in a body, and what is there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in pairs:
        yield path + (step,), inner
        yield from places(inner, path + (step,))

def nasty(right):
    """Bodies made from a right one: what it is, its bytes, and what is expected."""
    text, twice = json.dumps(right).encode(), json.dumps(right).encode()[1:]
    yield from [
        ("right", text, ACCEPT), ("no last brace", text[:-1], REFUSE), ("half", text[:len(text) // 2], REFUSE),
        ("empty", b"", REFUSE), ("null", b"null", REFUSE), ("array", b"[" + text + b"]", REFUSE),
        ("text", b'"x"', REFUSE), ("number", b"7", REFUSE), ("true", b"true", REFUSE), ("two", text + text, REFUSE),
        ("not UTF-8", b"\xff" + text, REFUSE), ("NUL behind", text + b"\0", REFUSE),
        ("UTF-16", json.dumps(right).encode("utf-16"), REFUSE), ("BOM", b"\xef\xbb\xbf" + text, EITHER),
        ("deep arrays", b"[" * 10000 + b"]" * 10000, REFUSE), ("deep objects, open", b'{"a":' * 10000, REFUSE),
        ("known keys twice", text[:-1] + b"," + twice, EITHER)]
    for what, inside, expected in [
            ("deep", b"[" * 10000 + b"]" * 10000, EITHER), ("exponent", b"1e99999", EITHER),
            ("digits", b"9" * 400, EITHER), ("NUL", b'"a\\u0000b"', ACCEPT), ("raw NUL", b'"a\0b"', REFUSE),
            ("lone surrogate", b'"\\ud800"', EITHER), ("not UTF-8", b'"\xc3\x28"', EITHER),
            ("2 MB", b'"' + b"x" * 2000000 + b'"', EITHER), ("two", b'1,"x_y":2', EITHER)]:
        yield what + " in an unknown field", b'{"x_y":' + inside + b"," + twice, expected
    # A live check without a usable identity is looked up by namespace and name.
    is_live_check = '"op_type": 2' in json.dumps(right)
    for path, old in places(right):
        last, changes = path[-1], []
        is_needed = last in NEEDED and not (is_live_check and "identity" in path)
        for new in [None, True, -1, 1.5, 2 ** 63, "", "x", "a:b", "a\0b", "\ud800", [], {}, [None], [[]], [{}]]:
            # A needed field is not there, or is a list or an object where it must not be, or the other way round.
            odd = type(new) is not type(old) and (new is None or {list, dict} & {type(new), type(old)})
            changes.append((new, REFUSE if odd and is_needed or last == "bk_cloud_id" and new == 1.5 else EITHER))
        if last in ("name", "proc_name", "ip", "task_id"):
            changes.append(("x" * 2000000, EITHER))
        if last in ("hosts", "ip_list"):
            changes += [(old + old, EITHER), ([dict(old[0], ip=ip) for ip in MANY], ACCEPT)]
        if last == "agent_id_list":
            changes += [(old + old, EITHER), (["3:" + ip for ip in MANY], ACCEPT)]
        for new, expected in changes:
            yield "%s = %.40s" % (path, ascii(new)), json.dumps(but(right, *path, new=new)).encode(), expected
        for raw in [b"1e400", b"9" * 400] if last == "bk_cloud_id" else []:
            marked = json.dumps(but(right, *path, new="@")).encode()
            yield "%s = %.9s" % (path, raw), marked.replace(b'"@"', raw), REFUSE

def run(quirks, last):
    """All begin, in order; who waits for a task goes on when it has ended; the last yields so that tasks are polled."""
    failed, waiting = [], []

    def step(name, go):
        """A part of a quirk; True if it is not the end of it."""
        try:
            if go():
                return True
        except StopIteration:
            pass
        except Exception as error:
            failed.append(name)
            return print("FAILED %s: %s %s" % (name, type(error).__name__, error))
        print("ok", name)

    def begin(quirk):
        began = quirk()
        return inspect.isgenerator(began) and not waiting.append((quirk.__name__, began, next(began), time.time()))

    def go_on(quirk, ask, since):
        answer = ask()
        rows = None if answer["code"] == 1000115 else good(answer)
        if rows is not None and all(row["error_code"] != 115 for row in rows.values()):
            return quirk.send(rows)
        assert time.time() - since < PATIENCE, "still running after 10 s: %.300s" % rows
        return True

    def poll():
        waiting[:] = [one for one in waiting if step(one[0], lambda: go_on(*one[1:]))]

    for quirk in quirks:
        step(quirk.__name__, lambda: begin(quirk))
    step(last.__name__, lambda: any(poll() for _ in last()))
    while waiting:
        time.sleep(0.1)
        poll()
    print("%d quirks, %d failed" % (len(quirks) + 1, len(failed)))
    return 1 if failed else 0

def lease(owner, generation):
    """Takes the owner's writer lease in this generation: only a lease gives one."""
    def state(question):
        return good(call("POST", "/api/abide/v1/state", question))
    name = "writer/" + owner
    state({"reset_lease": {"name": name, "above": generation - 2, "force": True}})
    holder = {"id": "quirks-%d" % generation, "host": "elsewhere", "boot_id": "b", "pid": 1, "started": 1}
    taken = state({"take_lease": {"name": name, "holder": holder, "lives_ms": 60000}})
    assert taken["ours"]["generation"] == generation, taken

HELPERS = set(globals())

# Addresses, and what real clients send.

def esb_names_answer_with_and_without_a_slash():
    for slash in SLASHES:
        for name, right in calls():
            good(call("POST", ESB + "gse/" + name + slash, right))
        for name in ["get_agent_status", "get_agent_info"]:
            good(call("POST", ESB + "gse/" + name + slash, {"hosts": [{"ip": place()[1], "bk_cloud_id": 3}]}))

def native_addresses_have_their_methods_and_queries_are_get_with_a_body():
    for slash in SLASHES:
        for name, right in calls():
            good(native(name, right, slash))

def api_gateway_names_answer_behind_any_prefix():
    for prefix, slash in itertools.product(PREFIXES, SLASHES):
        for name, right in calls():
            good(apigw(name + slash, right, prefix))

def job_names_answer_under_job_and_jobv3_by_business_and_by_scope():
    for version, slash in itertools.product(["job", "jobv3"], SLASHES):
        for name, right in job_calls():
            good(call("POST", ESB + version + "/" + name + slash, right))
            scoped = dict(but(right, "bk_biz_id"), bk_scope_type="biz", bk_scope_id="2")
            good(call("POST", ESB + version + "/" + name + slash, scoped))
            if name != "get_proc_result":
                good(call("POST", ESB + version + "/" + name + slash, dict(scoped, bk_scope_type="biz_set")))

def list_agent_state_has_its_own_address_and_unknown_agents_have_rows_or_1011003():
    for prefix, slash in itertools.product(PREFIXES, SLASHES):
        ids = ["3:" + place()[1], "0200000000525400"]
        answer = apigw("list_agent_state" + slash, {"agent_id_list": ids}, prefix, "cluster")
        if answer["code"] != 1011003:
            assert sorted(row["bk_agent_id"] for row in good(answer)) == sorted(ids), answer
            assert all(set(row) >= {"status_code", "version"} for row in answer["data"]), answer

def agent_status_and_info_are_keyed_by_cloud_and_ip():
    for name, ip in itertools.product(["get_agent_status", "get_agent_info"], [place()[1], "fd00::77"]):
        row = good(gse(name, {"hosts": [{"ip": ip, "bk_cloud_id": 3}]}))["3:" + ip]
        assert (row["ip"], row["bk_cloud_id"], row["bk_agent_alive"]) == (ip, 3, 0) and "version" in row, row

def a_content_type_may_be_missing_or_wrong():
    ns, ip = place()
    for kind in [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "no such thing"]:
        headers = {"Content-Type": kind} if kind else {}
        good(gse("get_proc_status", bare(ns, ip), headers))
        good(call("GET", "/procapi/v1/proc/status", bare(ns, ip), headers))
        good(job("operate_process", managed(ns, ip, 2), headers=headers))

def unknown_fields_are_accepted_at_every_level():
    def strewn(value):
        if isinstance(value, dict) and "a" not in value:  # labels are the caller's own
            return dict({step: strewn(inner) for step, inner in value.items()}, x_y=[{"z": None}])
        return [strewn(inner) for inner in value] if isinstance(value, list) else value
    for ask, each in [(gse, calls()), (job, job_calls())]:
        for name, right in each:
            good(ask(name, strewn(right)))

def integer_labels_are_accepted_and_read_back_as_text():
    ns, ip = place()
    right = but(full(ns, ip, op_type=2), "meta", "labels", new={"id": 1024, "zero": 0, "less": -7, "text": "1"})
    rows_are(good(gse("register_proc_info", right)), {key(ns, ip): 0})
    row, = infos(ns, ip)
    assert row["meta"]["labels"] == {"id": "1024", "zero": "0", "less": "-7", "text": "1"}, row
    good(gse("operate_proc", right))

def a_failure_is_http_200_with_an_envelope():
    for name, ask in itertools.product(NATIVE, [gse, native, apigw]):
        bad(ask(name, {}), name)
    for name, version in itertools.product(["manage_proc", "operate_process", "get_proc_result"], ["job", "jobv3"]):
        bad(job(name, {}, version), name)

def job_envelopes_have_request_id_and_permission():
    for name, right in job_calls():
        answer = job(name, right)
        assert answer["request_id"] and "permission" in answer, answer

def job_envelopes_of_failures_have_request_id_and_permission():
    for name, _ in job_calls():
        answer = job(name, {})
        assert answer.get("request_id") and "permission" in answer, answer

def the_documents_gse_examples_are_accepted_as_they_are():
    ns, ip = place()
    base = {"identity": {"index_key": "", "proc_name": "proc-test", "setup_path": "/data/gsetest/", "user": "root",
                         "pid_path": "/data/gsetest/proc-test.pid", "config_path": "/data/gsetest/proc-test.conf",
                         "log_path": "/data/gsetest/logs/"},
            "control": {verb + "_cmd": "./%s.sh" % verb for verb in VERBS},
            "warn_report_policy": {"report_id": 0}, "configmap": [{"path": "", "md5": ""}]}
    policy = {"auto_type": 1, "start_check_secs": 5, "stop_check_secs": 5, "start_retries": 3, "start_interval": 20,
              "crotab_rule": ""}
    resource = {"cpu": 10.0, "mem": 10.0, "fd": 10000, "disk": 100, "net": 0}
    meta = {"namespace": ns, "name": "proc-test", "labels": {"proc_name": "proc-test"}}
    host = {"ip": ip, "bk_cloud_id": 1}
    registered = {"meta": meta, "hosts": [dict(host, bk_supplier_id=2)],
                  "spec": dict(base, resource=resource, monitor_policy=policy)}
    rows = good(gse("register_proc_info", registered))
    done = {"error_code": 0, "error_msg": "success", "content": ""}
    assert rows == {"1:2:%s:%s:proc-test" % (ip, ns): done}, rows
    started = {"meta": meta, "op_type": 0, "hosts": [host], "spec": dict(base, alive_monitor_policy=policy)}
    assert good(gse("operate_proc", started))["task_id"].startswith("GSETASK:")

def the_documents_job_examples_are_accepted_as_they_are():
    hosts = [{"bk_cloud_id": 0, "ip": place()[1]}]
    one = {"proc_name": "nginx", "proc_owner": "root", "setup_path": "/data/home/nginx/bin/", "start_cmd": "echo start",
           "cfg_path": "/data/etc/nginx.conf", "log_path": "/data/logs/nginx/", "pid_path": "/data/var/run/nginx/",
           "stop_cmd": "echo stop", "restart_cmd": "echo restart", "reload_cmd": "echo reload", "kill_cmd": "echo kill",
           "func_id": "", "instance_id": "", "value_key": "key_test", "type": 2, "cpu_lmt": 20, "mem_lmt": 30,
           "cycle_time": 10, "instance_num": 2, "start_check_begin_time": 5, "start_check_end_time": 5, "op_timeout": 5,
           "ip_list": hosts}
    two = {"setup_path": "/usr/local/xxx", "proc_name": "gseagent", "pid_path": "/usr/local/xxx", "account": "root",
           "contact": "root", "cpu_lmt": 50, "mem_lmt": 30, "ip_list": hosts}
    business, scope = {"bk_biz_id": 1}, {"bk_scope_type": "biz", "bk_scope_id": "1"}
    for name, version, scope, info in [("manage_proc", "job", business, one), ("manage_proc", "jobv3", scope, one),
                                       ("operate_process", "job", business, two)]:
        task = good(job(name, dict(scope, op_type=1, process_infos=[info]), version))["bk_gse_taskid"]
        assert task.startswith("GSETASK:"), task

def credentials_come_in_the_body_in_a_header_or_in_both():
    right = bare(*place())
    for user in [{"bk_token": "t"}, {"bk_username": "u"}]:
        body = dict(right, bk_app_code="all", bk_app_secret="s3cret", **user)
        good(call("POST", ESB + "gse/get_proc_status/", body, auth="none"))
    for path in [ESB + "gse/get_proc_status/", "/prod/api/v2/proc/get_proc_status_v2"]:
        good(call("POST", path, right, HEADER))
    good(call("POST", "/api/v2/proc/get_proc_status_v2", right, {"X-Bk-Tenant-Id": "default"}, auth="header"))

def wrong_credentials_are_refused_with_an_envelope():
    ns, ip = place()
    wrong = dict(CREDENTIALS, bk_app_secret="guess")
    for more, header in [({}, None), (wrong, None), ({}, json.dumps(wrong)), ({}, "{"), ({}, "[1]")]:
        headers = {"X-Bkapi-Authorization": header} if header else {}
        raw = json.dumps(dict(full(ns, ip), **more)).encode()
        assert envelope(send("POST", ESB + "gse/register_proc_info/", raw, headers)[1])["code"] != 0, (more, header)
    absent(infos(ns, ip))

# The registry: no agent is needed.

def registry_rows_are_keyed_by_cloud_supplier_ip_namespace_and_name():
    ns, ip = place()
    for name in ["register_proc_info", "update_proc_info", "unregister_proc_info", "register_proc_info"]:
        rows = good(gse(name, full(ns, ip)))
        rows_are(rows, {key(ns, ip): 0}, name)
        assert type(rows[key(ns, ip)]["content"]) is str, rows

def registering_what_exists_is_850_in_its_row_only():
    ns, ip = place()
    good(gse("register_proc_info", full(ns, ip)))
    rows_are(good(native("register_proc_info", full(ns, ip, ip + "1"))), {key(ns, ip): 850, key(ns, ip + "1"): 0})

def a_host_without_a_supplier_is_keyed_with_supplier_0_and_its_row_says_so():
    ns, ip = place()
    right = but(full(ns, ip), "hosts", 0, "bk_supplier_id")
    rows_are(good(gse("register_proc_info", right)), {key(ns, ip, supplier="0:"): 0})
    row, = good(gse("get_proc_status", right))["proc_infos"]
    assert row["host"] == {"ip": ip, "bk_cloud_id": 3, "bk_supplier_id": 0}, row

def an_ipv6_host_is_part_of_a_key():
    return ipv6_hosts("fd00::7:1", "fe80::1")

def an_ipv6_host_is_keyed_as_it_was_written():
    return ipv6_hosts("FD00::7:2", "fd00:0:0:0:0:0:7:3")

def a_status_row_has_every_field_and_a_registered_one_is_stopped():
    ns, ip = place()
    begin = time.time()
    good(gse("register_proc_info", full(ns, ip)))
    for name in ["get_proc_status", "get_proc_status_v2"]:
        row, = infos(ns, ip, call=name)
        assert row["meta"] == {"namespace": ns, "name": "web", "labels": {"a": "b"}}, row
        assert row["host"] == {"ip": ip, "bk_cloud_id": 3, "bk_supplier_id": 5}, row
        assert (row["flag"], row["status"], row["pid"]) == (2, 2, -1), row
        assert set(row) >= {"message", "version", "cpu_usage", "mem_usage", "fd", "disk", "net"}, row
        assert all(type(row[when]) is int for when in ["register_time", "last_start_time", "report_time"]), row
        assert begin - 2 <= row["register_time"] <= time.time() + 2, row
    assert row["isauto"] is False, row

def a_host_is_found_by_its_cloud_and_ip_as_agent_id():
    ns, ip = place()
    good(gse("register_proc_info", full(ns, ip)))
    asked = {"meta": {"namespace": ns, "name": "web"}, "agent_id_list": ["3:" + ip]}
    row, = good(apigw("get_proc_status_v2", asked))["proc_infos"]
    assert row["bk_agent_id"] == "3:" + ip and row["status"] == 2, row

def what_is_not_registered_has_no_row_or_zeros():
    ns, ip = place()
    good(gse("register_proc_info", full(ns, ip)))
    good(gse("register_proc_info", full(ns, ip + "1", name="other")))
    for asked in ["get_proc_status", "get_proc_status_v2"]:
        absent(infos(ns, ip + "2", ip + "1", call=asked))
        absent(infos(ns, ip, name="none", call=asked))
        absent(infos(ns + "x", ip, call=asked))
    good(gse("unregister_proc_info", bare(ns, ip)))
    absent(infos(ns, ip))

def sync_pages_by_1000_and_counts_all_of_the_namespace_and_status_takes_2000_hosts():
    ns, ip = place()
    rows_are(good(gse("register_proc_info", full(ns, *MANY[:2300]))), {key(ns, ip): 0 for ip in MANY[:2300]})
    good(gse("register_proc_info", full(ns + "x", ip)))
    found = []
    for start, length in [(0, 1000), (1000, 1000), (2000, 300), (3000, 0)]:
        page = good(native("sync_proc_status", {"meta": {"namespace": ns}, "page": {"start": start, "limit": 1000}}))
        assert (page["count"], len(page["proc_infos"])) == (2300, length), (start, page["count"])
        found += [row["host"]["ip"] for row in page["proc_infos"]]
    assert sorted(found) == sorted(MANY[:2300])
    over = gse("sync_proc_status", {"meta": {"namespace": ns}, "page": {"start": 0, "limit": 5000}})
    assert over["code"] != 0 or len(over["data"]["proc_infos"]) <= 1000, "a limit is at most 1000"
    assert len(infos(ns, *MANY[:2000])) == 2000

def no_gse_call_returns_the_spec():
    ns, ip = place()
    env = {"TOKEN": {"value": "marked-secret", "secret": True}}
    right = full(ns, ip, op_type=2, spec=spec(ns, env=env, control={"start_cmd": "./marked-command"}))
    answers = [gse(name, right) for name in ["register_proc_info", "update_proc_info", "get_proc_status_v2"]]
    answers.append(gse("sync_proc_status", {"meta": {"namespace": ns}, "page": {"start": 0, "limit": 9}}))
    answers.append(gse("get_proc_operate_result", good(gse("operate_proc", right))))
    assert "marked" not in json.dumps(answers), answers

def process_groups_are_keyed_without_a_name_and_read_back():
    ns, ip = place()
    group = {"meta": {"namespace": ns}, "hosts": bare(ns, ip)["hosts"]}
    assert "g1" not in json.dumps(good(native("get_process_group_info", group))["process_group_infos"])
    right = dict(group, spec={"process_group": [{"id": "g1", "resource": POOL}]})
    rows_are(good(native("set_process_group_info", right)), {"3:5:%s:%s" % (ip, ns): 0})
    for ask in [native, gse]:
        text = json.dumps(good(ask("get_process_group_info", group))["process_group_infos"])
        assert '"g1"' in text and '"mem_pool_limit": 40' in text, text

def process_group_weights_are_0_or_1():
    for field in ["cpu_pool_weight", "mem_pool_weight"]:
        odd = {"process_group": [{"id": "g1", "resource": dict(POOL, **{field: 2})}]}
        bad(gse("set_process_group_info", bare(*place(), spec=odd)), field)

def process_groups_keep_the_newest_generation_too():
    ns, ip = place()
    group = {"process_group": [{"id": "g1", "resource": POOL}]}
    lease(ns, 7)
    for generation, code in [(7, 0), (6, 1900409)]:
        headers = {"X-Abide-Owner": ns, "X-Abide-Generation": str(generation)}
        rows_are(good(gse("set_process_group_info", bare(ns, ip, spec=group), headers)), {"3:5:%s:%s" % (ip, ns): code})

def two_instances_of_a_host_may_not_share_an_identity():
    ns, ip = place()
    good(gse("register_proc_info", full(ns, ip)))
    twin = full(ns, ip, name="twin", spec=spec(ns))
    bad(gse("register_proc_info", twin), "setup_path + proc_name is taken")
    elsewhere = full(ns, ip + "1", name="twin", spec=spec(ns))
    rows_are(good(gse("register_proc_info", elsewhere)), {key(ns, ip + "1", "twin"): 0})
    keyed = but(twin, "spec", "identity", "value_key", new="k-" + ns)
    rows_are(good(gse("register_proc_info", keyed)), {key(ns, ip, "twin"): 0}, "value_key tells them apart:")
    for field in ["value_key", "index_key"]:
        third = but(full(ns, ip, name="third"), "spec", "identity", field, new="k-" + ns)
        bad(gse("register_proc_info", third), field + " is taken")

# Operations: on a host without an agent they end in 117, within 10 s.

def every_op_type_is_taken_and_ends_in_117_within_10_s():
    ns, ip = place()
    control = {verb + "_cmd": "true" for verb in VERBS}
    items = [but(full(ns, ip, name="op%d" % op, op_type=op), "spec", "control", new=control) for op in OPS]
    rows = yield v2(good(gse("operate_proc_multi", {"proc_operate_req": items})))
    rows_are(rows, {key(ns, ip, "op%d" % op, ""): 117 for op in OPS})
    assert all(type(row["content"]) is str for row in rows.values()), rows

def ops_1_2_4_and_9_come_with_the_identity_alone():
    ns, ip = place()
    items = [full(ns, ip, name="op%d" % op, op_type=op) for op in [1, 2, 4, 9]]
    items = [dict(item, spec={"identity": item["spec"]["identity"]}) for item in items]
    rows = yield v2(good(gse("operate_proc_multi", {"proc_operate_req": items})))
    rows_are(rows, {key(ns, ip, "op%d" % op, ""): 117 for op in [1, 2, 4, 9]})

def one_task_is_keyed_as_the_asking_call_keys():
    ns, ip = place()
    data = good(native("operate_proc_v2", full(ns, ip, op_type=2)))
    rows_are((yield v1(data)), {key(ns, ip): 117})
    for ask in [native, gse, apigw]:
        rows_are(good(ask("get_proc_operate_result_v2", data)), {key(ns, ip, supplier=""): 117})
        rows_are(good(ask("get_proc_operate_result", data)), {key(ns, ip): 117})

def agent_ids_are_keys_and_may_have_colons_and_64_characters_but_not_65():
    ns, ip = place()
    ids = ["3:" + ip, "0:fd00::9", "a:" * 32]
    item = {"meta": {"namespace": ns, "name": "web"}, "agent_id_list": ids, "op_type": 0, "spec": spec(ns)}
    bad(apigw("operate_proc_v2", dict(item, agent_id_list=["a" * 65])), "65 characters")
    rows = yield v2(good(apigw("operate_proc_multi", {"proc_operate_req": [item]})))
    rows_are(rows, {"%s:%s:web" % (one, ns): 117 for one in ids})

def a_multi_call_mixes_ops_hosts_and_agents_and_a_bad_op_is_832_in_its_row_alone():
    ns, ip = place()
    items = [full(ns, ip, name="a", op_type=0), full(ns + "x", ip + "1", op_type=1), full(ns, ip + "2", op_type=5),
             dict(but(full(ns, name="c", op_type=4), "hosts"), agent_id_list=["0200-" + ns])]
    rows = yield v2(good(native("operate_proc_multi", {"proc_operate_req": items})))
    rows_are(rows, {key(ns, ip, "a", ""): 117, key(ns + "x", ip + "1", supplier=""): 117,
                    "0200-%s:%s:c" % (ns, ns): 117, key(ns, ip + "2", supplier=""): 832})

def an_unknown_op_type_is_832_in_its_row():
    ns, ip = place()
    for op, name in itertools.product([5, 6, 10, 99, -1], ["operate_proc", "operate_proc_v2"]):
        task = good(gse(name, full(ns, ip, op_type=op)))
        rows_are(good(gse("get_proc_operate_result", task)), {key(ns, ip): 832}, op)

def the_v1_shape_uses_the_registered_spec_and_failing_changes_nothing():
    ns, ip = place()
    good(gse("register_proc_info", full(ns, ip)))
    rows_are((yield v1(good(native("operate_proc", bare(ns, ip, op_type=0))))), {key(ns, ip): 117})
    row, = infos(ns, ip, call="get_proc_status_v2")
    assert (row["flag"], row["status"], row["isauto"]) == (2, 2, False), row

def the_v1_shape_without_a_registration_does_not_succeed():
    ns, ip = place()
    answer = native("operate_proc", bare(ns, ip, op_type=0))
    rows = (yield v1(answer["data"])) if answer["code"] == 0 else {"": {"error_code": 1}}
    assert rows and all(row["error_code"] for row in rows.values()), rows

def the_v2_shape_requires_a_spec():
    ns, ip = place()
    good(gse("register_proc_info", full(ns, ip)))
    bad(gse("operate_proc_v2", bare(ns, ip, op_type=0)))
    bad(gse("operate_proc_multi", {"proc_operate_req": [bare(ns, ip, op_type=0)]}))

def an_op_with_a_spec_needs_no_registration_and_failing_makes_none():
    ns, ip = place()
    rows_are((yield v2(good(gse("operate_proc", full(ns, ip, op_type=0))))), {key(ns, ip, supplier=""): 117})
    absent(infos(ns, ip))

def twenty_thousand_hosts_end_in_117_within_10_s_too():
    ns, _ = place()
    rows = yield v2(good(gse("operate_proc_v2", full(ns, *MANY, op_type=0))))
    rows_are(rows, {key(ns, ip, supplier=""): 117 for ip in MANY})

def an_unknown_task_is_a_failure():
    for name in ["get_proc_operate_result", "get_proc_operate_result_v2"]:
        bad(gse(name, {"task_id": "GSETASK:20150723:1"}))
    bad(job("get_proc_result", {"bk_biz_id": 2, "bk_gse_taskid": "GSETASK:20150723:1"}))

# JOB.

def job_results_have_a_status_and_are_keyed_by_path_name_cloud_and_ip():
    ns, ip = place()
    hosts = [{"bk_cloud_id": 3, "ip": ip}, {"bk_cloud_id": 0, "ip": ip}, {"bk_cloud_id": 0, "ip": "fd00::8"}]
    data = good(job("operate_process", managed(ns, ip, 0, ip_list=hosts)))
    rows_are((yield of_job(data)), {"/opt/%s/web:%d:%s" % (ns, host["bk_cloud_id"], host["ip"]): 117 for host in hosts})
    assert "status" in good(job("get_proc_result", dict(data, bk_biz_id=2)))

def a_job_setup_path_may_end_with_a_slash():
    ns, ip = place()
    rows = yield of_job(good(job("manage_proc", managed(ns, ip, setup_path="/opt/%s/" % ns))))
    assert [one.replace("//", "/") for one in rows] == ["/opt/%s/web:3:%s" % (ns, ip)], rows

def job_operate_takes_the_eight_ops_and_else_says_832():
    ns, ip = place()
    for op in OPS:
        good(job("operate_process", managed(ns, ip, op)))
    for op in [5, 6, 10]:
        task = good(job("operate_process", managed(ns, ip, op)))
        rows_are(good(of_job(task)()), {"/opt/%s/web:3:%s" % (ns, ip): 832}, op)

def job_manage_has_two_ops_of_its_own_and_no_other():
    ns, ip = place()
    for op, version in itertools.product([0, 3, 4, 5, 7, 8, 9], ["job", "jobv3"]):
        answer = job("manage_proc", managed(ns, ip, op), version)
        if answer["code"] == 0:
            rows_are(good(of_job(answer["data"])()), {"/opt/%s/web:3:%s" % (ns, ip): 832}, op)
    rows_are((yield of_job(good(job("manage_proc", managed(ns, ip, 2))))), {"/opt/%s/web:3:%s" % (ns, ip): 117})

def a_job_process_is_the_instance_registered_with_its_identity():
    ns, ip = place()
    return job_named(ns, ip, [process(ns, ip)], [ns + ":alias"])

def another_job_process_is_named_by_business_and_value_key_or_proc_name():
    ns, ip = place()
    processes = [process(ns + "x", ip), process(ns + "y", ip, value_key="k-" + ns)]
    return job_named(ns, ip, processes, ["job-%d:web" % BUSINESS, "job-%d:k-%s" % (BUSINESS, ns)])

def a_job_process_is_named_alike_whatever_else_is_in_the_call():
    ns, ip = place()
    processes = [process(ns, ip), process(ns + "x", ip)]
    return job_named(ns, ip, processes, [ns + ":alias", "job-%d:web" % BUSINESS])

def job_needs_what_its_document_requires_and_no_more():
    ns, ip = place()
    of_both = [("bk_biz_id",), ("op_type",), ("process_infos",)] + [("process_infos", 0, *path) for path in [
        ("proc_name",), ("ip_list",), ("ip_list", 0, "ip"), ("ip_list", 0, "bk_cloud_id")]]
    for name, needed, optional in [("manage_proc", ["proc_owner"], ["setup_path", "pid_path"]),
                                   ("operate_process", ["setup_path", "pid_path"], ["proc_owner", "type"])]:
        for path in of_both + [("process_infos", 0, field) for field in needed]:
            bad(job(name, but(managed(ns, ip), *path)), (name, path))
        for field in optional:
            good(job(name, but(managed(ns, ip), "process_infos", 0, field)))
    for scope in [{"bk_scope_type": "biz"}, {"bk_scope_id": "2"}]:
        bad(job("manage_proc", dict(but(managed(ns, ip), "bk_biz_id"), **scope), "jobv3"), scope)

def two_job_processes_with_one_result_key_do_not_go_into_one_call():
    ns, ip = place()
    twins = [process(ns, ip, value_key="a-" + ns), process(ns, ip, value_key="b-" + ns)]
    bad(job("operate_process", {"bk_biz_id": 2, "op_type": 2, "process_infos": twins}))

def job_limits_are_percentages_and_types_are_three():
    for more in [{"cpu_lmt": 101}, {"mem_lmt": -1}, {"type": 3}]:
        bad(job("manage_proc", managed(*place(), **more)), more)
    for kind in [1, 2]:
        good(job("manage_proc", managed(*place(), type=kind, cpu_lmt=0, mem_lmt=100)))

def job_type_0_needs_a_cycle_time():
    right = managed(*place(), type=0, cycle_time=60)
    good(job("manage_proc", right))
    bad(job("manage_proc", but(right, "process_infos", 0, "cycle_time")))

def job_type_is_0_by_default_which_needs_a_cycle_time():
    right = but(managed(*place(), cycle_time=60), "process_infos", 0, "type")
    good(job("manage_proc", right))
    bad(job("manage_proc", but(right, "process_infos", 0, "cycle_time")))

# What a caller must send, and may.

def what_is_required_of_a_caller_is_required():
    ns, ip = place()
    paths = [("meta",), ("meta", "namespace"), ("meta", "name"), ("hosts",), ("hosts", 0, "ip"), ("spec", "identity")]
    for path in paths + [("spec", "identity", field) for field in ["proc_name", "setup_path", "pid_path", "user"]]:
        wrong = but(full(ns, ip, op_type=3), *path)
        for name in ["register_proc_info", "update_proc_info", "operate_proc", "operate_proc_v2"]:
            bad(gse(name, wrong), (name, path))
        bad(gse("operate_proc_multi", {"proc_operate_req": [wrong]}), path)
    for name in ["operate_proc", "operate_proc_v2"]:
        bad(gse(name, full(ns, ip)), "op_type")
    absent(infos(ns, ip))

def all_else_is_optional():
    ns, ip = place()
    least = but(full(ns, ip, spec={"identity": spec(ns)["identity"]}), "meta", "labels")
    for name in ["register_proc_info", "update_proc_info"]:
        rows_are(good(gse(name, least)), {key(ns, ip): 0})
    row, = infos(ns, ip)
    assert row["meta"].get("labels", {}) == {}, row

def every_field_of_a_manifests_spec_is_taken_in_every_call_with_a_spec():
    ns, ip = place()
    policy = {"auto_type": 0, "start_check_secs": 0, "stop_check_secs": 3, "start_retries": 0, "start_interval": 1,
              "op_timeout": 9}
    env = {"A": "1", "B": {"file": "/run/secrets/b"}, "C": {"value": "c", "secret": True}}
    of_job = {"proc_owner": "root", "func_id": "1", "instance_id": "1", "instance_num": 1, "cycle_time": 10,
              "start_check_begin_time": 1, "start_check_end_time": 2}
    whole = dict(spec(ns), env=env, job=of_job, resource={"cpu": 30.0, "mem": 10.5, "fd": 10, "disk": 10, "net": 10},
                 warn_report_policy={"report_id": 0}, configmap=[{"path": "/etc/web.conf", "md5": "0" * 32}])
    whole["identity"].update(config_path="/etc/web.conf", log_path="/var/log/web", value_key="whole-" + ns)
    good(gse("register_proc_info", full(ns, ip, spec=whole)))
    for mode, rule, field in itertools.product(["daemon", "foreground"], ["crontab_rule", "crotab_rule"],
                                               ["monitor_policy", "alive_monitor_policy"]):
        one = dict(but(whole, "monitor_policy"), **{field: dict(policy, **{rule: "* * * * *"})})
        one["control"] = dict({verb + "_cmd": "true" for verb in VERBS}, start_mode=mode)
        right = full(ns, ip, spec=one, op_type=2)
        rows_are(good(gse("register_proc_info", right)), {key(ns, ip): 850})
        rows_are(good(gse("update_proc_info", right)), {key(ns, ip): 0})
        for name in ["operate_proc", "operate_proc_v2"]:
            good(gse(name, right))
        good(gse("operate_proc_multi", {"proc_operate_req": [right]}))

def zero_is_kept_unset_stays_unset_and_crontab_rule_is_written_as_documented():
    for field in ["monitor_policy", "alive_monitor_policy"]:
        ns, ip = place()
        policy = {"auto_type": 0, "start_retries": 0, "start_check_secs": 0}
        one = dict(but(spec(ns), "monitor_policy"), **{field: dict(policy, crotab_rule="*/5 * * * *")})
        good(gse("register_proc_info", full(ns, ip, spec=one)))
        # GSE has no call that tells; this is the gateway's own.
        kept = good(envelope(send("GET", "/api/abide/v1/processes?namespace=" + ns)[1]))["items"][0]["spec"]
        assert kept["monitor_policy"] == dict(policy, crontab_rule="*/5 * * * *") and "resource" not in kept, kept

# The headers of this project's own clients.

def a_call_with_the_same_id_is_executed_once():
    ns, ip = place()
    def once():
        return {"X-Abide-Op": "00000000-0000-4000-8000-%06d%06d" % (RUN, next(NUMBERS))}
    same = once()
    for _ in range(2):
        rows_are(good(gse("register_proc_info", full(ns, ip), same)), {key(ns, ip): 0})
    multi = {"proc_operate_req": [full(ns, ip, op_type=0)]}
    for ask in [lambda headers: gse("operate_proc", full(ns, ip, op_type=0), headers),
                lambda headers: gse("operate_proc_multi", multi, headers),
                lambda headers: job("manage_proc", managed(ns, ip), headers=headers)]:
        same = once()
        tasks = [list(good(ask(headers)).values())[0] for headers in [same, same, once(), {}]]
        assert tasks[0] == tasks[1] and len(set(tasks)) == 3, tasks

def an_older_generation_is_1900409_in_its_row():
    ns, ip = place()
    def by(generation):
        return {"X-Abide-Owner": ns, "X-Abide-Generation": str(generation)}
    lease(ns, 7)
    rows_are(good(gse("register_proc_info", full(ns, ip), by(7))), {key(ns, ip): 0})
    for headers, code in [(by(6), 1900409), (by(8), 1900409), (by(7), 0), (by(10), 0), (by(9), 1900409), ({}, 0)]:
        if headers == by(10):
            lease(ns, 10)
        rows_are(good(gse("update_proc_info", full(ns, ip), headers)), {key(ns, ip): code}, headers)
    rows_are((yield v1(good(gse("operate_proc", full(ns, ip, op_type=0), by(9))))), {key(ns, ip): 1900409})

QUIRKS = [value for name, value in globals().items() if inspect.isfunction(value) and name not in HELPERS]

def nasty_bodies_are_answered_with_an_envelope_in_time():
    ip = place()[1]
    targets = [("POST", ESB + "gse/%s/" % name, right) for name, right in calls()]
    targets += [("POST", ESB + "job/%s/" % name, right) for name, right in job_calls()]
    targets += [("POST", ESB + "gse/%s/" % name, {"hosts": [{"ip": ip, "bk_cloud_id": 3}]})
                for name in ["get_agent_status", "get_agent_info"]]
    targets += [("POST", "/api/v2/cluster/list_agent_state", {"agent_id_list": ["3:" + ip]}),
                ("GET", "/procapi/v2/proc/status", bare(*place()))]
    wrong, sent = [], 0
    for method, path, right in targets:
        for what, raw, expected in nasty(right):
            begin, sent = time.time(), sent + 1
            try:
                status, text = send(method, path, raw)
                assert status == 200, (status, text[:200])
                answer = envelope(text)
                if expected == REFUSE:
                    bad(answer, text[:200])
                assert expected != ACCEPT or answer["code"] in (0, 1011003), (expected, text[:200])
                assert time.time() - begin < 30, "it took %.1f s" % (time.time() - begin)
            except Exception as error:
                wrong.append("%s %s, %s: %r" % (method, path, what, error))
        assert send("GET", "/healthz", headers={})[0] == 200, path
        yield
    assert not wrong, "%d of %d\n  %s" % (len(wrong), sent, "\n  ".join(wrong))

sys.exit(run(QUIRKS, nasty_bodies_are_answered_with_an_envelope_in_time))
