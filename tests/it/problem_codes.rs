//! Problem codes: each has an input that triggers it, with a location and a message that help.

use std::collections::BTreeSet;

use abide::manifest::{Code, Severity};

use crate::support::{GOOD, Tree, with};

/// Exactly these problems, in this order. `…` at the end: the rest of the line does not matter here.
#[track_caller]
pub fn expect(files: &[(&str, &str)], problems: &[&str]) {
    let found = Tree::new(files).problems();
    let same = |(found, wanted): (&String, &&str)| match wanted.strip_suffix('…') {
        Some(start) => found.starts_with(start),
        None => found == wanted,
    };
    let all = found.len() == problems.len() && found.iter().zip(problems).all(same);
    assert!(all, "found:\n{}\nwanted:\n{}", found.join("\n"), problems.join("\n"));
}

#[track_caller]
pub fn one(text: &str, problem: &str) {
    expect(&[("a.yaml", text)], &[problem]);
}

/// [`GOOD`] as another process, so that two can stand in one tree.
pub fn other(name: &str) -> String {
    GOOD.replace("name: api", &format!("name: {name}")).replace("/opt/api", &format!("/opt/{name}"))
}

#[test]
fn the_good_process_is_good() {
    expect(&[("a.yaml", GOOD)], &[]);
}

#[test]
fn e0101_syntax_spoils_only_its_document() {
    let file = format!("{GOOD}---\nmeta: [\n---\n{}", other("b").replace("start_cmd:", "start_cmd: {"));
    expect(&[("a.yaml", &file)], &["a.yaml:10:7 E0101 unclosed bracket '['", "a.yaml:19:3 E0101 …"]);
    one(
        &with("  control:", "\tcontrol:"),
        "a.yaml:7:2 E0101 tabs disallowed within this context (block indentation)",
    );
    one(
        "\tmeta: {}",
        "a.yaml:1:1 E0101 found character that cannot start any token, while scanning for the next token | YAML does not allow tabs as indentation, or @ or ` at the start of a plain scalar",
    );
    expect(&[("a.json", "{\"meta\": {},\n \"hosts\": [,]}")], &["a.json:2:12 E0101 expected value"]);
}

#[test]
fn e0102_unknown_fields_have_a_suggestion_and_no_follow_up_errors() {
    one(
        &with("start_cmd", "strat_cmd"),
        "a.yaml:7:13 E0102 spec.control has no field \"strat_cmd\" | did you mean \"start_cmd\"?",
    );
    one(
        &with("spec:", "start_cmd: x\nspec:"),
        "a.yaml:5:1 E0102 a Process has no field \"start_cmd\" | the field belongs to spec.control",
    );
    one(
        &with("auto_type: 1", "<<: {}"),
        "a.yaml:8:20 E0102 spec.monitor_policy has no field \"<<\" | YAML 1.2 has no merge keys; use a `kind: Defaults` document to share fields",
    );
    one(&with("spec:", "op_type: 1\nspec:"), "a.yaml:5:1 E0102 a Process has no field \"op_type\" | …");
    one(&with("spec:", "owner: me\nspec:"), "a.yaml:5:1 E0102 a Process has no field \"owner\" | …");
    one(
        "kind: HostGroup\nmeta: {name: g}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0, group: x}]\n",
        "a.yaml:3:40 E0102 hosts[0] has no field \"group\" | …",
    );
}

#[test]
fn e0103_wrong_types_name_actual_and_expected_type() {
    one(
        &with("name: api}", "name: 5}"),
        "a.yaml:3:30 E0103 meta.name must be text, not the number 5 | quote the value if text is intended",
    );
    one(
        &with("auto_type: 1", "auto_type: \"1\""),
        "a.yaml:8:31 E0103 spec.monitor_policy.auto_type must be a whole number, 0 to 2, not the text \"1\" | write 1 without quotes",
    );
    one(
        &with("[{ip: 10.0.0.1, bk_cloud_id: 0}]", "{ip: 10.0.0.1, bk_cloud_id: 0}"),
        "a.yaml:4:8 E0103 hosts must be a list of text, or map, not a map | begin each item with `- `",
    );
    one(
        &with("spec:", "adopt: yes\nspec:"),
        "a.yaml:5:8 E0103 adopt must be one of true, false, not the text \"yes\" | YAML 1.2 has only true and false",
    );
    one(
        &with("auto_type: 1", "auto_type: 99999999999999999999"),
        "a.yaml:8:31 E0103 spec.monitor_policy.auto_type must be a whole number, 0 to 2, not a number beyond 64 bits",
    );
    one(
        &with("name: api}", "name: api, labels: {a: true}}"),
        "a.yaml:3:47 E0103 meta.labels.a must be text, not the boolean true | quote the value if text is intended",
    );
    one(
        &with("name: api}", "name: !x api}"),
        "a.yaml:3:33 E0103 meta.name must be text, not a value with the tag \"!x\"",
    );
    one(
        &with("spec:", "? [a]\n: b\nspec:"),
        "a.yaml:5:3 E0103 a key must be text, not a list | quote the key",
    );
    one(
        "just text\n",
        "a.yaml:1:1 E0103 a document must be a map with meta, hosts and spec, not the text \"just text\"",
    );
    one(
        &with("spec:", "rollout: {batch: ten}\nspec:"),
        "a.yaml:5:18 E0103 rollout.batch \"ten\" is neither a count nor a percentage | such as 3 or 10%",
    );
}

#[test]
fn e0104_missing_fields_point_at_their_parent() {
    one(&with(", name: api", ""), "a.yaml:3:1 E0104 meta.name is missing | …");
    one(
        &with("pid_path: /run/api.pid, ", ""),
        "a.yaml:6:3 E0104 spec.identity.pid_path is missing | Pid file of the process. `user` needs write access to its directory.",
    );
    one(
        &with("proc_name: api", "proc_name: \"\""),
        "a.yaml:6:14 E0104 spec.identity.proc_name is missing | …",
    );
    one(&with("hosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]\n", ""), "a.yaml:1:1 E0104 hosts is missing | …");
    one(
        &with("hosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]", "hosts: []"),
        "a.yaml:4:1 E0104 hosts is missing | …",
    );
    one(
        &with(", bk_cloud_id: 0", ""),
        "a.yaml:4:9 E0104 hosts[0].bk_cloud_id is missing: one address may exist in several cloud areas | use bk_cloud_id: 0 for the default area",
    );
    // The full form may leave out user and auto_type; a body may not.
    expect(&[("a.yaml", &with(", user: app", ""))], &[]);
    expect(&[("a.yaml", &with("  monitor_policy: {auto_type: 1}\n", ""))], &[]);
    let body = with("apiVersion: abide/v1\nkind: Process\n", "")
        .replace(", user: app", "")
        .replace("{auto_type: 1}", "{start_retries: 1}");
    expect(
        &[("a.yaml", &body)],
        &[
            "a.yaml:4:3 E0104 spec.identity.user is missing | …",
            "a.yaml:6:3 E0104 spec.monitor_policy.auto_type is missing | …",
        ],
    );
}

#[test]
fn e0105_duplicate_keys_are_reported_at_the_later_one() {
    one(
        &with("auto_type: 1", "auto_type: 1, auto_type: 2"),
        "a.yaml:8:34 E0105 key \"auto_type\" occurs twice in this map; the first is at line 8, column 20 | remove one of them",
    );
    one(
        &with("name: api}", "name: api, labels: {x: a, x: a}}"),
        "a.yaml:3:50 E0105 key \"x\" occurs twice in this map; the first is at line 3, column 44 | remove one of them",
    );
    one(
        &with("  monitor_policy:", "  alive_monitor_policy: {auto_type: 1}\n  monitor_policy:"),
        "a.yaml:9:3 E0105 \"monitor_policy\" is an alias of \"alive_monitor_policy\", which is set at line 8, column 3 | remove one of them",
    );
    expect(
        &[("a.json", "{\"meta\": {\"name\": \"a\", \"name\": \"a\", \"namespace\": \"b\"}}")],
        &[
            "a.json:1:1 E0104 hosts is missing | …",
            "a.json:1:1 E0104 spec is missing | …",
            "a.json:1:24 E0105 key \"name\" occurs twice in this map; the first is at line 1, column 11 | remove one of them",
        ],
    );
}

#[test]
fn e0105_one_field_in_two_spellings() {
    one(
        &with("spec:", "on_change: {env: reload, spec.env: none}\nspec:"),
        "a.yaml:5:26 E0105 on_change names env twice, with and without the leading `spec.` | remove one of them",
    );
}

#[test]
fn e0106_unknown_kinds_and_versions() {
    one(
        &with("kind: Process", "kind: Proces"),
        "a.yaml:2:7 E0106 kind \"Proces\" is unknown | did you mean Process?",
    );
    one(
        &with("abide/v1", "abide/v2"),
        "a.yaml:1:13 E0106 apiVersion \"abide/v2\" is unknown | this version of Abide supports abide/v1",
    );
    one(
        "{\"process_infos\": []}\n",
        "a.yaml:1:19 E0106 the document is a JOB request body, not a manifest | `abide convert FILE` converts it to manifests",
    );
}

#[test]
fn e0107_values_outside_their_enum() {
    one(
        &with("spec:", "state: runing\nspec:"),
        "a.yaml:5:8 E0107 state \"runing\" is not an allowed value | did you mean running?",
    );
    one(
        &with("spec:", "protect: [delete, never]\nspec:"),
        "a.yaml:5:19 E0107 protect[1] \"never\" is not an allowed value | one of delete, restart, stop",
    );
    one(
        &with("./api}", "./api, start_mode: x}"),
        "a.yaml:7:43 E0107 spec.control.start_mode \"x\" is not an allowed value | one of daemon, foreground",
    );
    one(
        &with("spec:", "on_change: {env: explode}\nspec:"),
        "a.yaml:5:18 E0107 on_change.env \"explode\" is not an allowed value | one of none, register, reload, restart, replace",
    );
}

#[test]
fn e0201_names_that_are_invalid_in_keys() {
    one(
        &with("namespace: web", "namespace: a/b"),
        "a.yaml:3:19 E0201 meta.namespace \"a/b\" cannot be used: the text contains '/', which a result key cannot carry | …",
    );
    one(
        &with("name: api}", "name: \"a:b\"}"),
        "a.yaml:3:30 E0201 meta.name \"a:b\" cannot be used: the text contains ':', which a result key cannot carry | …",
    );
    one(
        &with("name: api}", "name: \"*\"}"),
        "a.yaml:3:30 E0201 meta.name \"*\" cannot be used: it is the pattern that matches every name | …",
    );
    one(
        &with("namespace: web", "namespace: '**'"),
        "a.yaml:3:19 E0201 meta.namespace \"**\" cannot be used: it is the pattern that matches every name | …",
    );
    one(
        &with("ip: 10.0.0.1, bk_cloud_id: 0", "bk_agent_id: \"a b\""),
        "a.yaml:4:23 E0201 bk_agent_id cannot be used: the text contains ' ', which a result key cannot carry | …",
    );
    one(
        &with("spec:", "depends_on: [a/b/c]\nspec:"),
        "a.yaml:5:14 E0201 depends_on \"a/b/c\" is not a process name: the text contains '/', which a result key cannot carry | …",
    );
    let long =
        with("name: api}", &format!("name: {}}}", "n".repeat(127))).replace("spec:", "instances: 10\nspec:");
    expect(
        &[("a.yaml", &long.replace("/run/api.pid", "/run/api.pid, value_key: \"${instance}\""))],
        &["a.yaml:3:30 E0201 with `instances`, the instance name …"],
    );
}

#[test]
fn e0202_to_e0206_values_out_of_their_bounds() {
    one(
        &with("/opt/api", "opt/api"),
        "a.yaml:6:42 E0202 spec.identity.setup_path \"opt/api\" is a relative path | use an absolute path, with a leading /",
    );
    one(
        &with("./api}", "./api}\n  configmap: [{path: x}]"),
        "a.yaml:8:22 E0202 spec.configmap[0].path \"x\" is a relative path | …",
    );
    one(&with("10.0.0.1", "10.0.0.300"), "a.yaml:4:14 E0203 \"10.0.0.300\" is not an IP address | …");
    one(
        &with("10.0.0.1", "web-1.example"),
        "a.yaml:4:14 E0203 \"web-1.example\" is not an IP address | such as 10.0.0.1 or 2001:db8::1; host names are not resolved",
    );
    one(
        &with("./api}", "./api}\n  resource: {cpu: 100.5}"),
        "a.yaml:8:19 E0204 spec.resource.cpu is 100.5; it must be a percentage from 0 to 100 | …",
    );
    one(
        &with("./api}", "./api}\n  resource: {mem: .nan}"),
        "a.yaml:8:19 E0204 spec.resource.mem is NaN; it must be a percentage from 0 to 100 | …",
    );
    one(
        &with("spec:", "rollout: {batch: 110%}\nspec:"),
        "a.yaml:5:18 E0204 rollout.batch \"110%\" is not a percentage from 0% to 100% | …",
    );
    one(
        &with("auto_type: 1", "auto_type: 3"),
        "a.yaml:8:31 E0205 spec.monitor_policy.auto_type is 3; it must be 0 to 2 | …",
    );
    one(
        &with("spec:", "instances: 0\nspec:"),
        "a.yaml:5:12 E0205 instances is 0; it must be 1 to 1000000 | …",
    );
    one(
        &with("bk_cloud_id: 0", "bk_cloud_id: -1"),
        "a.yaml:4:37 E0205 hosts[0].bk_cloud_id is -1; it must be 0 or more | …",
    );
    one(
        &with("auto_type: 1", "start_check_secs: -1"),
        "a.yaml:8:38 E0206 spec.monitor_policy.start_check_secs is -1 seconds; it must be 0 to 86400 seconds | …",
    );
    one(
        &with("auto_type: 1", "op_timeout: 999999999"),
        "a.yaml:8:32 E0206 spec.monitor_policy.op_timeout is 999999999 seconds; it must be 0 to 86400 seconds | …",
    );
    one(
        &with("spec:", "rollout: {soak: 30x}\nspec:"),
        "a.yaml:5:17 E0206 rollout.soak \"30x\" is not a duration of at most a week | such as 30s, 5m or 1h30m",
    );
}

#[test]
fn e0207_to_e0214_values_that_do_not_parse() {
    one(
        &with("auto_type: 1", "auto_type: 0, crontab_rule: 61 * * * *"),
        "a.yaml:8:48 E0207 crontab rule \"61 * * * *\" is invalid: number out of bounds | …",
    );
    one(
        &with("name: api}", "name: api, labels: {abide_owner: me}}"),
        "a.yaml:3:44 E0208 label \"abide_owner\" is reserved: names that begin with abide_ belong to Abide | …",
    );
    one(
        &with("./api}", "\"./api ${PORT}\"}"),
        "a.yaml:7:24 E0209 unknown variable ${PORT} | known variables: ${instance} ${host.ip} ${host.cloud} ${name} ${namespace}; write $${PORT} (or $PORT) for a variable of the shell",
    );
    one(
        &with("./api}", "\"./api ${instance}\"}"),
        "a.yaml:7:24 E0209 ${instance} needs `instances` | add `instances: N` to the process",
    );
    one(
        &with("proc_name: api", "proc_name: \"api-${name}\""),
        "a.yaml:6:25 E0209 variables are not replaced in spec.identity.proc_name | variables are replaced in paths, commands, env, health and value_key",
    );
    let agent =
        with("ip: 10.0.0.1, bk_cloud_id: 0", "bk_agent_id: a1").replace("./api", "\"./api ${host.ip}\"");
    one(
        &agent,
        "a.yaml:4:9 E0209 the spec uses ${host.…}, but host @a1 has only an agent id | add its ip and bk_cloud_id, here or in a HostGroup",
    );
    one(
        &with("./api}", "./api}\n  configmap: [{path: /x, md5: abc}]"),
        "a.yaml:8:31 E0210 spec.configmap[0].md5 \"abc\" is not an md5 digest | …",
    );
    one(
        &with("./api}", "./api}\n  env: {\"A=B\": x}"),
        "a.yaml:8:9 E0211 environment variable \"A=B\" has an invalid name | …",
    );
    one(
        &with("./api}", "./api}\n  env: {A: {secret: true}}"),
        "a.yaml:8:9 E0211 spec.env.A must have one of file, exec and value | …",
    );
    let group = "kind: HostGroup\nmeta: {name: g}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]\n---\n";
    let chosen = with("{ip: 10.0.0.1, bk_cloud_id: 0}", "{group: g, labels: a b}");
    one(
        &format!("{group}{chosen}"),
        "a.yaml:8:28 E0212 \"a b\" is none of key=v, key!=v, key in (a,b), key, !key | …",
    );
    one(
        &with("spec:", "on_change: {control.strat_cmd: none}\nspec:"),
        "a.yaml:5:13 E0213 a spec has no field \"control.strat_cmd\" | did you mean \"control.start_cmd\"?",
    );
    let window = "kind: Policy\nmeta: {name: p}\nwindows: [{days: mon-fry, from: \"9:00\", to: \"17:00\", tz: Mars/Base, for: [stop]}]\n";
    expect(
        &[("a.yaml", window)],
        &[
            "a.yaml:3:18 E0214 windows[0].days \"mon-fry\" is invalid | such as mon-fri, or sat,sun",
            "a.yaml:3:33 E0214 windows[0].from \"9:00\" is invalid | use HH:MM in quotes, such as \"09:00\"",
            "a.yaml:3:58 E0214 windows[0].tz \"Mars/Base\" is invalid | use a name of the time zone database, such as Asia/Shanghai",
        ],
    );
}

#[test]
fn e0215_empty_or_overspecified_hosts() {
    one(
        &with("{ip: 10.0.0.1, bk_cloud_id: 0}", "{bk_cloud_id: 0}"),
        "a.yaml:4:9 E0215 a host needs ip and bk_cloud_id, or bk_agent_id | such as {ip: 10.0.0.1, bk_cloud_id: 0}",
    );
    one(
        &with("{ip: 10.0.0.1, bk_cloud_id: 0}", "{ip: 10.0.0.1, group: g}"),
        "a.yaml:4:24 E0215 an entry of hosts must be either a group or a host, not both | split it into two entries",
    );
    one(
        &with("bk_cloud_id: 0}", "bk_cloud_id: 0, labels: a=b}"),
        "a.yaml:4:40 E0215 labels select hosts of a group, but this entry has no group | add `group: NAME`",
    );
}

#[test]
fn e0216_health_checks_without_one_valid_probe() {
    let health = |value: &str| with("spec:", &format!("health: {value}\nspec:"));
    expect(&[("a.yaml", &health("http://127.0.0.1:80/${name}"))], &[]);
    expect(&[("a.yaml", &health("{tcp: \"[::1]:80\", interval: 2s, retries: 1}"))], &[]);
    one(
        &health("{interval: 5s}"),
        "a.yaml:5:1 E0216 health needs exactly one of cmd, http and tcp | such as http: http://127.0.0.1:8080/healthz",
    );
    one(
        &health("https://127.0.0.1/"),
        "a.yaml:5:1 E0216 health.http \"https://127.0.0.1/\" is not an http:// URL | such as http://127.0.0.1:8080/healthz",
    );
    one(
        &health("\"http://127.0.0.1/a b\""),
        "a.yaml:5:1 E0216 health.http \"http://127.0.0.1/a b\" contains a space or a control character | such as http://127.0.0.1:8080/healthz",
    );
    one(
        &health("tcp://127.0.0.1"),
        "a.yaml:5:1 E0216 health.tcp \"127.0.0.1\" is not HOST:PORT | such as 127.0.0.1:6379",
    );
    one(
        &with("./api}", "./api, health_cmd: a}\n  health: b"),
        "a.yaml:8:3 E0216 spec.health and spec.control.health_cmd are two health checks | remove health_cmd; a command can be written as health: {cmd: …}",
    );
}

#[test]
fn spec_fields_of_the_short_form_are_located_where_they_are_written() {
    let short = |lines: &str| with("spec:", &format!("{lines}\nspec:"));
    let valid = "stop_signal: SIGINT\nstop_timeout: 3s\nreload_signal: HUP\nrestart: on-failure\nlog: {max_size: 10MB, keep: 3}\n\
                 limits: {memory: 512MB, cpu: 1.5}\nenv_file: /etc/api/env\nhooks: {before_start: ./check}\n\
                 sandbox: {no_new_privs: true, umask: \"0027\", ulimits: {nofile: 65536, core: infinity}, protect_system: full}";
    expect(&[("a.yaml", &short(valid))], &[]);
    one(
        &short("stop_signal: TRM"),
        "a.yaml:5:14 E0107 stop_signal \"TRM\" is not an allowed value | did you mean TERM?",
    );
    one(
        &short("sandbox: {umask: \"999\"}"),
        "a.yaml:5:18 E0205 sandbox.umask \"999\" is not an octal mask | such as \"0027\"",
    );
    one(
        &short("limits: {memory: 5XB}"),
        "a.yaml:5:18 E0205 limits.memory \"5XB\" is not a size of at least 1 bytes | such as 10MB or 1GiB",
    );
    one(
        &(short("log: {keep: 3}") + "  log: {keep: 4}\n"),
        "a.yaml:5:1 E0105 log and spec.log are the same field, and both are set; the other is at a.yaml:10:3 | remove one of them",
    );
}

#[test]
fn warnings_are_not_errors() {
    let warned = |text: &str, problem: &str| {
        one(text, problem);
        let loaded = Tree::new(&[("a.yaml", text)]).load();
        assert_eq!((loaded.errors(), loaded.desired.instances.len()), (0, 1), "{problem}");
    };
    warned(
        &with("name: api}", "name: api, labels: {version: 3}}"),
        "a.yaml:3:53 W0501 meta.labels.version is a number in place of text; it is read as \"3\" | write \"3\"",
    );
    let body = with("apiVersion: abide/v1\nkind: Process\n", "");
    warned(
        &format!("{body}op_type: 0\n"),
        "a.yaml:7:1 W0502 op_type is ignored in a manifest | remove it; `state` sets the desired state",
    );
    warned(
        &format!("{body}bk_app_secret: x\n"),
        "a.yaml:7:1 W0502 bk_app_secret is ignored in a manifest | remove it, and rotate it if this file was ever committed",
    );
    warned(
        &with("./api}", "./api, start_mode: foreground, restart_cmd: x}"),
        "a.yaml:7:55 W0503 restart_cmd is not used in foreground mode, where a restart is a stop and a start | remove it",
    );
    let down = other("b").replace("spec:", "state: absent\nspec:");
    expect(
        &[("a.yaml", &with("spec:", "depends_on: [b]\nspec:")), ("b.yaml", &down)],
        &[
            "a.yaml:5:14 W0504 depends_on names web/b, whose state is absent: the start would never proceed | …",
        ],
    );
}

#[test]
fn all_codes_have_a_case() {
    let cases = [
        include_str!("problem_codes.rs"),
        include_str!("codes_across_documents.rs"),
        include_str!("short_form.rs"),
        include_str!("variables.rs"),
        include_str!("manifest_loading.rs"),
        include_str!("hostile_manifests.rs"),
        include_str!("last_good.rs"),
        include_str!("overlays.rs"),
    ];
    let cases = cases.concat();
    let missing: BTreeSet<_> =
        Code::ALL.iter().map(|code| code.text()).filter(|code| !cases.contains(code)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn a_codes_letter_is_its_severity() {
    for code in Code::ALL {
        let letter = if code.severity() == Severity::Error { "E" } else { "W" };
        assert!(code.text().starts_with(letter) && !code.title().is_empty(), "{code:?}");
    }
}
