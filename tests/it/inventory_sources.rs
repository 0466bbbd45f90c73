//! Sources of inventories: commands, HTTP endpoints, a CMDB and Ansible, also hostile ones.

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use abide::http::{ApiCredentials, ApiEndpoint, ClientConfig};
use abide::inventory::cmdb::CmdbSelection;
use abide::inventory::{Cmdb, HttpInventory, InventoryKind, InventorySource};
use abide::manifest::inventory::parse;
use abide::model::Amount;
use serde_json::{Value, json};

use crate::http::Request;
use crate::support::{Tree, abide, needs, until};

fn source(kind: InventoryKind, timeout: Duration) -> InventorySource {
    let max_shrink = Amount::Count(1);
    InventorySource { name: "it".to_owned(), kind, interval: Duration::from_secs(60), timeout, max_shrink }
}

/// The hosts as `HOST label=value,…`, or the error.
fn read_within(kind: InventoryKind, timeout: Duration) -> Result<Vec<String>, String> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let read = runtime.block_on(source(kind, timeout).read()).map_err(|error| error.to_string())?;
    let hosts = parse(&read.text).expect("a snapshot");
    let line = |member: abide::manifest::check::GroupMember| {
        let labels: Vec<String> =
            member.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        format!("{} {}", member.host.key, labels.join(",")).trim_end().to_owned()
    };
    Ok(hosts.into_iter().map(line).collect())
}

fn read(kind: InventoryKind) -> Result<Vec<String>, String> {
    read_within(kind, Duration::from_secs(60))
}

fn shell(script: &str) -> InventoryKind {
    InventoryKind::Command(["sh", "-c", script].map(str::to_owned).to_vec())
}

#[test]
fn a_command_prints_the_hosts() {
    let json = shell("echo '[{\"ip\": \"10.0.0.2\", \"set\": \"eu\"}, \"10.0.0.1\"]'; echo noise >&2");
    assert_eq!(read(json), Ok(vec!["0:10.0.0.1".to_owned(), "0:10.0.0.2 set=eu".to_owned()]));
    assert_eq!(read(shell("echo 'no token' >&2; exit 3")), Err("sh exited with 3: no token".to_owned()));
    assert_eq!(read(shell("printf '10.0\\377'")), Err("byte 4 is not UTF-8 text".to_owned()));
    let missing = read(InventoryKind::Command(vec!["/does/not/exist".to_owned()])).expect_err("missing");
    assert!(missing.contains("cannot run /does/not/exist"), "{missing}");
}

#[test]
fn a_command_that_hangs_or_floods_is_killed_with_its_children() {
    let tree = Tree::new::<&str>(&[]);
    let pids = tree.path().join("pids");
    let script = format!("sleep 1000 & echo $! >> {0}; echo $$ >> {0}; sleep 1000", pids.display());
    let begin = Instant::now();
    let error = read_within(shell(&script), Duration::from_millis(500)).expect_err("it hangs");
    assert!(error.contains("longer than"), "{error}");
    let error = read(shell("yes 10.0.0.1,eu | head -c 1073741824")).expect_err("a flood");
    assert!(error.contains("wrote more than 67108864 bytes"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(40));
    let pids = std::fs::read_to_string(pids).expect("pids");
    until("both ended", || pids.lines().all(|pid| !crate::system::is_alive(pid.parse().expect("a pid"))));
}

#[test]
fn a_file_that_blocks_is_not_opened() {
    let tree = Tree::new(&[("hosts.csv", "ip\n10.0.0.1\n")]);
    assert_eq!(read(InventoryKind::File(tree.path().join("hosts.csv"))), Ok(vec!["0:10.0.0.1".to_owned()]));
    let fifo = tree.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    for path in [fifo.as_path(), Path::new("/dev/zero"), Path::new("/")] {
        let error = read(InventoryKind::File(path.to_owned())).expect_err("not a file");
        assert!(error.contains("is not a regular file"), "{error}");
    }
    let error = read(InventoryKind::File(tree.path().join("none"))).expect_err("missing");
    assert!(error.contains("No such file"), "{error}");
}

#[test]
fn more_than_a_million_hosts_are_refused() {
    let mut csv = String::from("ip\n");
    for n in 0..=1_000_000_u32 {
        csv.push_str(&format!("{}\n", std::net::Ipv4Addr::from_bits(0x0a00_0000 + n)));
    }
    let tree = Tree::new(&[("hosts.csv", &csv)]);
    let begin = Instant::now();
    let error = read(InventoryKind::File(tree.path().join("hosts.csv"))).expect_err("too many");
    assert_eq!(error, "more than 1000000 hosts");
    tree.write("big.csv", vec![b'x'; (64 << 20) + 1]);
    let error = read(InventoryKind::File(tree.path().join("big.csv"))).expect_err("too large");
    assert_eq!(error, "more than 64 MiB");
    assert!(begin.elapsed() < Duration::from_secs(60));
}

/// Answers each request with the bytes that the handler returns, and then whatever `tail` writes.
fn serve(handler: impl Fn(Request) -> String + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let handler = Arc::new(handler);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (handler, mut stream) = (Arc::clone(&handler), stream);
            std::thread::spawn(move || {
                while let Some(request) = Request::read(&mut stream) {
                    let answer = handler(request);
                    let is_endless = answer.contains("endless");
                    if stream.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                    let part = format!("4000\r\n{}\r\n", "x".repeat(0x4000));
                    while is_endless && stream.write_all(part.as_bytes()).is_ok() {}
                }
            });
        }
    });
    format!("http://{address}")
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

fn http(url: &str, headers: &[(&str, &str)]) -> InventoryKind {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let config = ClientConfig { headers, ..ClientConfig::default() };
    InventoryKind::Http(HttpInventory::new(url, &config).expect("a client"))
}

#[test]
fn an_http_endpoint_is_bounded_and_never_redirects() {
    let url = serve(|request| match request.path.as_str() {
        "/hosts" if request.head.contains("s3cret") => ok("[\"10.0.0.1\"]"),
        "/away" => {
            "HTTP/1.1 302 Found\r\nLocation: http://10.0.0.9/hosts\r\nContent-Length: 0\r\n\r\n".to_owned()
        }
        "/endless" => "HTTP/1.1 200 OK\r\nX: endless\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(),
        "/hang" => "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nip\n".to_owned(),
        _ => "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n".to_owned(),
    });
    let at = |path: &str| format!("{url}{path}");
    assert_eq!(read(http(&at("/hosts"), &[("X-Token", "s3cret")])), Ok(vec!["0:10.0.0.1".to_owned()]));
    assert_eq!(read(http(&at("/hosts"), &[])), Err("HTTP 403 Forbidden".to_owned()));
    let error = read(http(&at("/away"), &[])).expect_err("a redirect");
    assert!(error.contains("redirects are never followed"), "{error}");
    assert_eq!(read(http(&at("/endless"), &[])), Err("more than 64 MiB".to_owned()));
    let begin = Instant::now();
    assert!(read_within(http(&at("/hang"), &[]), Duration::from_millis(500)).is_err());
    assert!(begin.elapsed() < Duration::from_secs(20));
    // Nothing is sent in plain text to another machine.
    assert!(HttpInventory::new("http://10.0.0.9/hosts", &ClientConfig::default()).is_err());
}

/// A host of the test CMDB: id, set and module.
struct CmdbHost(i64, i64, i64);

/// A CMDB with 1,203 hosts. Answers `list_biz_hosts` as documented.
struct TestCmdb {
    hosts: Vec<CmdbHost>,
    calls: AtomicUsize,
    /// Hosts disappear after this call.
    shrinks_after: usize,
}

impl TestCmdb {
    fn new(shrinks_after: usize) -> Arc<TestCmdb> {
        let hosts = (1..=1203).map(|id| CmdbHost(id, 11 + id % 2, 21 + id % 3)).collect();
        Arc::new(TestCmdb { hosts, calls: AtomicUsize::new(0), shrinks_after })
    }

    fn answer(&self, request: &Request) -> Value {
        let failed = |code: i64, message: &str| json!({"result": false, "code": code, "message": message, "data": null});
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        let body: Value = serde_json::from_slice(&request.body).expect("JSON");
        if request.path != "/api/c/compapi/v2/cc/list_biz_hosts/" {
            return failed(1, "unknown path");
        }
        let in_header = request.head.contains("\"bk_app_secret\":\"s3cret\"");
        if !in_header || body["bk_app_code"] != "abide" || body["bk_app_secret"] != "s3cret" {
            return failed(1_640_001, "app authentication failed");
        }
        let page = &body["page"];
        let (start, limit) = (page["start"].as_u64().expect("start"), page["limit"].as_u64().expect("limit"));
        if body["bk_biz_id"] != 2 || limit > 500 || page["sort"] != "bk_host_id" {
            return failed(1_199_006, "invalid parameter");
        }
        let wanted = |name: &str, id: i64| match body[name].as_array() {
            None => true,
            Some(ids) => ids.iter().any(|one| one.as_i64() == Some(id)),
        };
        let is_gone = |id: i64| self.shrinks_after > 0 && call >= self.shrinks_after && id == 1;
        let found: Vec<&CmdbHost> = self
            .hosts
            .iter()
            .filter(|CmdbHost(id, set, module)| {
                wanted("bk_set_ids", *set) && wanted("bk_module_ids", *module) && !is_gone(*id)
            })
            .collect();
        let asked: Vec<&str> =
            body["fields"].as_array().expect("fields").iter().filter_map(Value::as_str).collect();
        let host = |CmdbHost(id, ..): &&CmdbHost| {
            let all = json!({
                "bk_host_id": id, "bk_cloud_id": id % 2, "bk_host_name": format!("web{id}"),
                "bk_host_innerip": format!("10.0.{}.{},192.168.0.1", id / 250, id % 250),
                "bk_os_type": "1", "bk_mem": 64,
            });
            let fields = all.as_object().expect("a map").clone();
            Value::Object(fields.into_iter().filter(|(name, _)| asked.contains(&name.as_str())).collect())
        };
        let info: Vec<Value> = found.iter().skip(start as usize).take(limit as usize).map(host).collect();
        json!({"result": true, "code": 0, "message": "success", "data": {"count": found.len(), "info": info}})
    }
}

fn cmdb(server: &Arc<TestCmdb>, secret: &str, selection: CmdbSelection) -> InventoryKind {
    let server = Arc::clone(server);
    let url = serve(move |request| ok(&server.answer(&request).to_string()));
    let credentials =
        ApiCredentials::App { code: "abide".to_owned(), secret: secret.to_owned(), username: None };
    let endpoint = ApiEndpoint { url, credentials, client_config: ClientConfig::default() };
    InventoryKind::Cmdb(Cmdb::new(&endpoint, CmdbSelection { biz_id: 2, ..selection }).expect("a client"))
}

fn names(pairs: &[(&str, i64)]) -> std::collections::BTreeMap<String, i64> {
    pairs.iter().map(|(name, id)| ((*name).to_owned(), *id)).collect()
}

#[test]
fn a_cmdb_is_read_page_by_page_with_fields_as_labels() {
    let server = TestCmdb::new(0);
    let labels = [("bk_host_name", "name"), ("bk_mem", "mem"), ("bk_gone", "gone")];
    let labels = labels.map(|(field, label)| (field.to_owned(), label.to_owned())).into();
    let hosts =
        read(cmdb(&server, "s3cret", CmdbSelection { labels, ..CmdbSelection::default() })).expect("hosts");
    assert_eq!((hosts.len(), server.calls.load(Ordering::SeqCst)), (1203, 3));
    assert_eq!(hosts[0], "0:10.0.0.2 mem=64,name=web2");
    let refused = read(cmdb(&server, "wrong", CmdbSelection::default())).expect_err("refused");
    assert!(refused.contains("app authentication failed") && !refused.contains("wrong"), "{refused}");
}

#[test]
fn sets_and_modules_of_a_cmdb_are_labels() {
    let server = TestCmdb::new(0);
    let selection = CmdbSelection {
        sets: names(&[("eu", 11), ("us", 12)]),
        modules: names(&[("api", 21), ("worker", 22)]),
        ..CmdbSelection::default()
    };
    let hosts = read(cmdb(&server, "s3cret", selection)).expect("hosts");
    assert_eq!(hosts.len(), 802);
    // Host 4 has set 11 and module 22.
    let fourth = hosts.iter().find(|host| host.starts_with("0:10.0.0.4 ")).expect("a host");
    assert_eq!(fourth, "0:10.0.0.4 module=worker,module.worker=true,set=eu,set.eu=true");
}

#[test]
fn a_list_of_a_cmdb_that_changes_between_pages_is_read_again() {
    let server = TestCmdb::new(1);
    let hosts = read(cmdb(&server, "s3cret", CmdbSelection::default())).expect("hosts");
    // One page of the first attempt, one that shows the change, and three pages.
    assert_eq!((hosts.len(), server.calls.load(Ordering::SeqCst)), (1202, 5));
}

#[test]
fn an_ansible_inventory_has_its_groups_as_labels() {
    let text = "[web]\nweb[1:2] ansible_host=10.0.0.1\n[web:vars]\nport=80\n";
    let tree = Tree::new(&[("twice.ini", text.to_owned()), ("hosts.ini", text.replace("[1:2]", "1"))]);
    let error = read(InventoryKind::Ansible(tree.path().join("twice.ini"))).expect_err("twice");
    assert_eq!(error, "line 2: host 0:10.0.0.1 is already at line 2");
    let hosts = read(InventoryKind::Ansible(tree.path().join("hosts.ini")));
    assert_eq!(hosts, Ok(vec!["0:10.0.0.1 group.web=true,name=web1".to_owned()]));
}

/// The real program, where it is installed, reads the same hosts and variables.
#[test]
fn ansible_itself_agrees() {
    if !needs("ansible-inventory") {
        return;
    }
    let text = "[web]\nweb[01:03] rack=a\n[eu:children]\nweb\n[eu:vars]\nzone=eu\n[web:vars]\nport=80\n";
    let tree = Tree::new(&[("hosts.ini", text)]);
    let output = std::process::Command::new("ansible-inventory")
        .args(["-i", "hosts.ini", "--list"])
        .current_dir(tree.path())
        .output()
        .expect("it runs");
    let theirs: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let ours = abide::import::ansible::parse(text, Some("ini")).expect("valid");
    for (name, _, effective) in ours.effective_hosts() {
        let vars = &theirs["_meta"]["hostvars"][name];
        for (variable, value) in effective.vars {
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            assert_eq!(Some(text(&vars[&variable])), value, "{name} {variable}");
        }
    }
}

/// A small text that expands without bound, or costs much time.
#[test]
fn an_inventory_of_ansible_that_expands_is_refused_early() {
    let chain: String = (1..5_000).map(|nth| format!("[g{nth}:children]\ng{}\n", nth + 1)).collect();
    let groups: String = (0..20_000).map(|nth| format!("[g{nth}]\n")).collect();
    let value = "x".repeat(16_000);
    let of_hosts = format!("10.0.[0:255].[0:255] v={value}\n");
    let of_group = format!("[web]\n10.0.[0:255].[0:255]\n[web:vars]\nv={value}\n");
    for (text, why) in [
        (&chain, "groups deep"),
        (&groups, "more than 10000 groups"),
        (&of_hosts, "more than 64 MiB"),
        (&of_group, "more than 64 MiB"),
    ] {
        let tree = Tree::new(&[
            ("hosts.ini", text.as_str()),
            ("abide.yaml", "inventories: {it: {ansible: hosts.ini}}\n"),
        ]);
        let output = abide(&["inventory", "show", "it", "--config", "abide.yaml"], tree.path(), b"");
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && err.contains(why), "{why}: {err:.300}");
    }
}

/// A relative program is that of the config file's folder, not that of the current directory.
#[test]
fn a_relative_command_is_in_the_folder_of_its_config_file() {
    let tree = Tree::new(&[("conf/abide.yaml", "inventories: {it: {command: [./hosts]}}\n")]);
    for (folder, ip) in [("conf", "10.0.0.1"), ("checkout", "10.0.0.2")] {
        tree.write(&format!("{folder}/hosts"), format!("#!/bin/sh\necho '[\"{ip}\"]'\n"));
        let file = tree.path().join(folder).join("hosts");
        std::fs::set_permissions(file, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
    }
    let args = ["inventory", "show", "it", "--config", "../conf/abide.yaml"];
    let output = abide(&args, &tree.path().join("checkout"), b"");
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(out.contains("10.0.0.1") && !out.contains("10.0.0.2"), "{out} {:?}", output);
}
