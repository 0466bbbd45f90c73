//! Sessions of the guides: systems on which the quoted commands run, from a terminal each.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use crate::fixtures::console::{Desk, Terminal};
use crate::fixtures::quotes::Block;
use crate::support::{needs, needs_root, project, test_user, until};
use crate::system::whoami;

const SECRET: &str = "a-secret-of-16-or-more";

/// Starts and stops the programs that the guide runs as services, and prints the end of their logs.
const SYSTEMCTL: &str = r#"#!/bin/sh
cd "$SITE" || exit 1
launch() {
    : > "$name.out"
    "$@" > "$name.out" 2>> "$name.log" < /dev/null &
    echo $! > "$name.pid"
    while kill -0 $! 2> /dev/null && ! grep -qs ^ready "$name.out"; do sleep 0.01; done
}
name=$2
case "$1 $2" in
"start abide-serve")
    launch $WRAPPER abide serve --listen "127.0.0.1:$(cat port 2> /dev/null || echo 0)" --data "$SITE/lib" --apps apps.yaml --agent-token-file tokens
    sed -n 's,^ready http://127.0.0.1:,,p' "$name.out" > new-port
    if [ -s new-port ]; then mv new-port port; fi ;;
"start abide-agent")
    launch abide agent --join "http://127.0.0.1:$(cat port)" --token-file token --data agent $AGENT_FLAGS ;;
stop*)
    kill "$(cat "$name.pid")"
    while kill -0 "$(cat "$name.pid")" 2> /dev/null; do sleep 0.01; done ;;
esac
"#;

/// The guides are for the app of one team, with its own namespace and owner; another team has a process on the same host.
fn apps() -> String {
    let me = whoami();
    format!(
        "apps:
  - {{code: ci, secret: {SECRET}, role: operate, namespaces: [web], hosts: ['0:*'], users: [{me}, abide-test], owners: [web-team]}}
  - {{code: shop, secret: {SECRET}, role: operate, namespaces: [shop], hosts: ['0:*'], users: [{me}], owners: [shop-team]}}
"
    )
}

/// A gateway and an agent that `systemctl` starts and stops.
struct Site {
    desk: Desk,
    terminal: Terminal,
}

impl Site {
    /// With the lines of the target `prod` after its address, and flags of the agent.
    fn new(target: &str, agent_flags: &str, variables: &[(&str, &str)]) -> Site {
        let variables: Vec<_> = variables.iter().copied().chain([("AGENT_FLAGS", agent_flags)]).collect();
        Site::prepare(target, &variables, |_| {})
    }

    /// The same, with something to do before the programs start.
    fn prepare(target: &str, variables: &[(&str, &str)], before: impl FnOnce(&Desk)) -> Site {
        let mut desk = Desk::new();
        desk.script("systemctl", SYSTEMCTL);
        desk.write("apps.yaml", apps());
        desk.write("tokens", "* agents-have-a-long-token\n");
        desk.write("token", "agents-have-a-long-token\n");
        desk.write("work/secret", format!("{SECRET}\n"));
        for file in ["apps.yaml", "tokens", "token", "work/secret"] {
            set_mode(&desk.path(file), 0o600);
        }
        let here = desk.folder.path().display().to_string();
        desk.variable("SITE", here);
        for (name, value) in variables {
            desk.variable(name, value);
        }
        before(&desk);
        let mut terminal = desk.terminal("work");
        terminal.prepare("systemctl start abide-serve && systemctl start abide-agent");
        let port = desk.read("port");
        let url = format!("http://127.0.0.1:{}", port.trim());
        desk.write(
            "work/abide.yaml",
            format!("owner: web-team\ntargets:\n  prod:\n    url: {url}\n{target}"),
        );
        Site { desk, terminal }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.desk.read("port").trim())
    }

    /// Starts the process of the other team, with that team's app.
    fn start_neighbour(&mut self) -> Neighbour {
        let desk = &mut self.desk;
        let manifest = single(desk, "till", "exec sleep 9999").replace("namespace: web", "namespace: shop");
        desk.write("shop/manifests/till.yaml", manifest);
        desk.write("shop/secret", format!("{SECRET}\n"));
        set_mode(&desk.path("shop/secret"), 0o600);
        let config = desk.read("work/abide.yaml").replace("web-team", "shop-team");
        desk.write("shop/abide.yaml", config.replace("app_code: ci", "app_code: shop"));
        let mut terminal = desk.terminal("shop");
        terminal.prepare("abide apply manifests --yes");
        let pid = desk.read("run/till.pid");
        assert!(!pid.trim().is_empty(), "{}", terminal.text());
        Neighbour { terminal, pid }
    }

    /// The other team's process was not touched, each team sees its own, and no output of the guide names the other's.
    fn check_neighbour(&mut self, mut neighbour: Neighbour) {
        assert_eq!(self.desk.read("run/till.pid"), neighbour.pid);
        assert!(!self.terminal.text().contains("till"), "{}", self.terminal.text());
        for (terminal, own, other) in
            [(&mut self.terminal, "w_1", "till"), (&mut neighbour.terminal, "till", "w_1")]
        {
            let before = terminal.text().len();
            terminal.prepare("abide get processes --expand; abide plan manifests --prune");
            let text = terminal.text()[before..].to_owned();
            assert!(text.contains(own) && !text.contains(other), "{text}");
        }
        let before = neighbour.terminal.text().len();
        neighbour.terminal.prepare("abide stop web/w_1 || echo refused with $?");
        let text = neighbour.terminal.text()[before..].to_owned();
        assert!(text.contains("app shop lacks namespace web") && text.contains("refused with 77"), "{text}");
    }

    fn run(&mut self, block: &Block) {
        self.desk.run(&mut self.terminal, block);
    }

    fn run_with(&mut self, block: &Block, before: impl FnMut(&Desk, usize)) {
        self.desk.run_with(&mut self.terminal, block, before);
    }
}

/// Another team on the same gateway, with a process on the same host.
struct Neighbour {
    terminal: Terminal,
    pid: String,
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}\n{}", self.desk.read("abide-serve.log"), self.desk.read("abide-agent.log"));
        }
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("a mode");
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name").trim().to_owned()
}

/// Target and variables of a gateway of Abide.
const ABIDE: &str = "    dialect: abide\n    auth: {app_code: ci, app_secret: {file: secret}}\n";
const PROD: &[(&str, &str)] = &[("ABIDE_CONFIG", "abide.yaml"), ("ABIDE_TARGET", "prod")];

/// A process `web/NAME` in the foreground; `start_cmd` is in line 11, column 16.
fn worker(desk: &Desk, name: &str, instances: usize, start: &str) -> String {
    let (here, user) = (desk.folder.path().display(), whoami());
    format!(
        "apiVersion: abide/v1
kind: Process
meta: {{namespace: web, name: {name}}}
hosts: [{{ip: 127.0.0.1, bk_cloud_id: 0}}]
instances: {instances}
rollout: {{batch: 1, auto_rollback: true}}
spec:
  identity: {{proc_name: sleep, setup_path: {here}, pid_path: '{here}/run/${{name}}.pid', user: {user}, value_key: '${{name}}'}}
  control:
    start_mode: foreground
    start_cmd: {start}
  monitor_policy: {{auto_type: 1, start_check_secs: 0}}
"
    )
}

/// A process `web/NAME` without instances, on a host.
fn single(desk: &Desk, name: &str, start: &str) -> String {
    worker(desk, name, 1, start).replace("instances: 1\nrollout: {batch: 1, auto_rollback: true}\n", "")
}

pub fn fleet([up, get, edit]: [Block; 3]) {
    let mut desk = Desk::new();
    let here = desk.folder.path().display().to_string();
    for entry in std::fs::read_dir(project().join("manifests")).expect("a folder").flatten() {
        let name = entry.file_name().into_string().expect("a name");
        if name.ends_with(".yaml") {
            let text = std::fs::read_to_string(entry.path()).expect("a manifest").replace("/tmp", &here);
            // No scheduled run is due during the session.
            let text = text.replace("soak: 5s", "soak: 1s").replace("* * * * *", "0 0 1 1 *");
            desk.write(&format!("manifests/{name}"), text);
        }
    }
    desk.rename("soaking for 5 s", "soaking for 1 s");
    let (mut first, mut second) = (desk.terminal("."), desk.terminal("."));
    desk.follow(&mut first, &up);
    desk.run(&mut second, &get);
    let quoted = &edit.entries[0].quoted;
    let broken = quoted.iter().position(|line| line.starts_with("error")).expect("an error");
    desk.edit("manifests/hello.yaml", "\"hello, it is", "\"HELLO, it is");
    desk.expect(&mut first, &edit, &quoted[..broken]);
    desk.edit("manifests/hello.yaml", "start_cmd", "strat_cmd");
    desk.expect(&mut first, &edit, &quoted[broken..]);
    second.prepare("abide down --stop-processes");
}

pub fn curl_gateway([serve]: [Block; 1]) {
    if !needs("curl") || !needs("jq") {
        return;
    }
    let mut desk = Desk::new();
    let here = desk.folder.path().display().to_string();
    desk.rename("/tmp", here);
    desk.variable("ABIDE_LISTEN", "127.0.0.1:0");
    let mut terminal = desk.terminal(".");
    desk.run(&mut terminal, &serve);
}

pub fn site_operations(all: [Block; 7]) {
    let [doctor, upgrade, lease, backup, restore, audit, converge] = all;
    if !needs("sqlite3") || !needs("curl") {
        return;
    }
    let mut site = Site::new(ABIDE, "", PROD);
    let here = site.desk.folder.path().display().to_string();
    site.desk.rename("ops-1", hostname());
    site.desk.script("chown", "#!/bin/sh\n");
    site.desk.script("journalctl", "#!/bin/sh\ntail -n 1 \"$SITE/abide-serve.log\"\n");
    site.desk.rename("/var/lib/abide", format!("{here}/lib"));
    site.desk.rename("/backup", format!("{here}/backup"));
    std::fs::create_dir(site.desk.path("backup")).expect("a folder");
    site.run(&doctor);
    let neighbour = site.start_neighbour();
    site.desk.write("work/manifests/api.yaml", single(&site.desk, "api", "exec sleep 9001"));
    site.desk.write("work/manifests/w.yaml", worker(&site.desk, "w", 3, "exec sleep 9000"));
    site.terminal.prepare("abide apply manifests --yes");
    site.run(&upgrade);
    let mut watch = site.desk.terminal("work");
    watch.start("abide watch manifests --listen 127.0.0.1:0");
    until("watch leads", || watch.text().contains("converged"));
    site.run(&lease);
    drop(watch);
    site.run(&backup);
    site.desk.edit("work/manifests/w.yaml", "9000", "9002");
    site.terminal.prepare("abide apply manifests --yes");
    site.run(&restore);
    site.desk.has_line(&site.desk.read("abide-serve.log"), &audit);
    site.terminal.prepare("abide apply manifests --yes || abide apply manifests --yes");
    let mut watch = site.desk.terminal("work");
    watch.start("abide watch manifests --listen 127.0.0.1:0");
    // Another client stops the process each time that watch has started it.
    let stop = format!(
        "curl -sf -u ci:{SECRET} {}/api/c/compapi/v2/gse/operate_proc/ -d '{{\"meta\": {{\"namespace\": \"web\", \"name\": \"api\"}},
         \"hosts\": [{{\"ip\": \"127.0.0.1\", \"bk_cloud_id\": 0}}], \"op_type\": 1}}'",
        site.url()
    );
    for times in 1..=4 {
        until("watch has started it", || watch.text().matches("converged").count() >= times);
        site.terminal.prepare(&stop);
    }
    until("watch gives up", || watch.text().contains("NotConverging"));
    site.desk.has_line(&watch.text(), &converge);
    drop(watch);
    site.check_neighbour(neighbour);
}

pub fn local_operations([rollback, logs]: [Block; 2]) {
    let mut desk = Desk::new();
    desk.write(
        "manifests/w.yaml",
        worker(&desk, "w", 3, "exec sleep 9000").replace("start_check_secs: 0", "start_check_secs: 1"),
    );
    let mut terminal = desk.terminal(".");
    terminal.prepare("abide apply manifests --yes");
    desk.edit("manifests/w.yaml", "exec sleep 9000", "exit 3");
    desk.run(&mut terminal, &rollback);
    let here = desk.folder.path().display().to_string();
    let api = single(&desk, "api", "for n in 1 2 3 4 5; do echo GET /$n 200; done; exec sleep 9000");
    desk.write("logs/api.yaml", api.replace("user:", &format!("log_path: {here}/api.log, user:")));
    desk.write(
        "logs/migrate.yaml",
        single(&desk, "migrate", "echo 3 migrations applied").replace("auto_type: 1", "auto_type: 2"),
    );
    terminal.prepare("abide apply logs --yes");
    desk.run(&mut terminal, &logs);
    terminal.prepare("abide down --stop-processes");
}

pub fn pipeline([markdown, budget, lock, saved]: [Block; 4]) {
    let mut site = Site::new(ABIDE, "", PROD);
    let neighbour = site.start_neighbour();
    site.desk.write("work/manifests/api.yaml", single(&site.desk, "api", "exec sleep 9001"));
    site.desk.write("work/manifests/w.yaml", worker(&site.desk, "w", 3, "exec sleep 9003"));
    site.terminal.prepare("abide apply manifests --yes");
    std::fs::remove_file(site.desk.path("work/manifests/api.yaml")).expect("a file");
    site.desk.edit("work/manifests/w.yaml", "9003", "9004");
    site.run(&markdown);
    site.run(&budget);
    site.desk.edit("work/manifests/w.yaml", "batch: 1", "batch: 1, soak: 1h");
    site.desk.rename("build-7", hostname());
    site.desk.rename("\"default\"", "\"web-team\"");
    let mut other = site.desk.terminal("work");
    other.start("abide apply manifests --yes");
    until("the other run soaks", || other.text().contains("soaking"));
    site.run(&lock);
    drop(other);
    site.desk.edit("work/manifests/w.yaml", "batch: 1, soak: 1h", "batch: 1");
    site.run_with(&saved, |desk, nth| {
        if nth == 2 {
            desk.edit("work/manifests/w.yaml", "9004", "9005");
        }
    });
    site.check_neighbour(neighbour);
}

pub fn platform(all: [Block; 6]) {
    let [trust, first, adopt, state, empty, note] = all;
    let target =
        "    dialect: gse-v2\n    auth: {app_code: ci, app_secret: {env: BK_APP_SECRET}, username: admin}\n";
    let variables = [("BK_APP_SECRET", SECRET), ("AGENT_FLAGS", "--as-host 0:10.0.0.1")];
    let mut site = Site::prepare(target, &variables, |desk| {
        // Apps of a platform have no scopes.
        desk.write("apps.yaml", format!("apps: [{{code: ci, secret: {SECRET}}}]\n"));
    });
    let here = site.desk.folder.path().display().to_string();
    let url = site.url();
    site.desk.rename("https://paas.example.com", &url);
    site.desk.rename("app_code: abide", "app_code: ci");
    site.desk.rename("/home/ann/fleet", format!("{here}/work"));
    site.desk.rename("/tmp/empty", format!("{here}/empty"));
    let daemon = |name: &str| daemon(&here, name);
    site.desk.write("work/manifests/api.yaml", daemon("api"));
    site.run(&trust);
    site.run(&first);
    let start = format!("sleep 9000 > /dev/null 2>&1 & echo $! > {here}/run/legacy.pid");
    site.terminal.prepare(&format!("(cd {here}; {start})"));
    site.desk.write("work/manifests/legacy.yaml", daemon("legacy"));
    site.run(&adopt);
    std::fs::remove_file(site.desk.path("work/manifests/legacy.yaml")).expect("a file");
    let config = site.desk.read("work/abide.yaml");
    let abide = format!("  state:\n    url: {url}\n{ABIDE}");
    site.desk.write("work/abide.yaml", format!("{config}{abide}"));
    site.desk.rename("https://abide.example.com", &url);
    site.terminal.prepare("abide config trust");
    site.run(&state);
    site.run_with(&empty, |desk, nth| match nth {
        0 => desk.edit("work/manifests/api.yaml", "sleep 9000", "sleep 9001"),
        _ => desk.edit("work/manifests/api.yaml", "pid_path: ", "pid_path: /other"),
    });
    site.desk.write("work/slow.yaml", daemon("slow").replace("auto_type", "op_timeout: 7, auto_type"));
    site.desk.write("work/rows.json", "[]");
    let mut offline = site.desk.terminal("work");
    offline.prepare("abide plan slow.yaml --observed rows.json --caps gse-v1");
    site.desk.has_line(&offline.text(), &note);
}

/// A daemon with all commands, as a platform needs it.
fn daemon(here: &str, name: &str) -> String {
    let (pid, user) = (format!("{here}/run/{name}.pid"), whoami());
    format!(
        "apiVersion: abide/v1
kind: Process
meta: {{namespace: web, name: {name}}}
hosts: [{{ip: 10.0.0.1, bk_cloud_id: 0}}]
spec:
  identity: {{proc_name: sleep, setup_path: {here}, pid_path: {pid}, user: {user}, value_key: {name}}}
  control:
    start_cmd: mkdir -p {here}/run; sleep 9000 > /dev/null 2>&1 & echo $! > {pid}
    stop_cmd: kill $(cat {pid})
    restart_cmd: kill $(cat {pid}); sleep 9000 > /dev/null 2>&1 & echo $! > {pid}
  monitor_policy: {{auto_type: 1, start_check_secs: 1}}
"
    )
}

/// A gateway whose folder is a small disk, which this fills.
pub fn full_disk([full]: [Block; 1]) {
    if !needs_root() || !needs("curl") || !needs("unshare") {
        return;
    }
    let mount =
        "mkdir -p \"$SITE/lib\" && mount -t tmpfs -o size=8m,mode=700 none \"$SITE/lib\" && exec \"$@\"";
    let script = format!("#!/bin/sh\n{mount}\n");
    let mut site = Site::prepare(ABIDE, &[("WRAPPER", "unshare -m small-disk")], |desk| {
        desk.script("small-disk", &script)
    });
    let body = "{\"meta\": {\"namespace\": \"web\", \"name\": \"api\"}, \"hosts\": [{\"ip\": \"10.0.0.1\", \"bk_cloud_id\": 0}],
        \"spec\": {\"identity\": {\"proc_name\": \"api\", \"setup_path\": \"/opt/api\", \"pid_path\": \"/run/api.pid\", \"user\": \"root\"},
                 \"control\": {\"start_cmd\": \"./api\"}}}";
    site.desk.rename("ci:…", format!("ci:{SECRET}"));
    site.desk.rename("-d …", format!("-d '{body}'"));
    let lib = "/proc/$(cat $SITE/abide-serve.pid)/root$SITE/lib";
    site.terminal.prepare(&format!(
        "URL={}; dd if=/dev/zero of={lib}/fill bs=64k 2> /dev/null; test -s {lib}/fill",
        site.url()
    ));
    site.run(&full);
}

pub fn agent_policy([check]: [Block; 1]) {
    let Some(user) = test_user() else { return };
    let mut site = Site::new(ABIDE, "", PROD);
    let here = site.desk.folder.path().display().to_string();
    for folder in ["", "db"] {
        std::fs::create_dir_all(site.desk.path(folder)).expect("a folder");
        set_mode(&site.desk.path(folder), 0o755);
    }
    chown(site.desk.path("db"), Some(user.uid), Some(user.gid)).expect("an owner");
    let setup = (format!("setup_path: {here}"), format!("setup_path: {here}/db"));
    site.desk.write(
        "work/manifests/api.yaml",
        single(&site.desk, "api", "exec sleep 9001").replace(&setup.0, &setup.1),
    );
    let db =
        single(&site.desk, "db", "exec sleep 9001").replace(&format!("{here}/run"), &format!("{here}/db"));
    let db = db.replace("user: root", &format!("user: {}, log_path: {here}/db/db.log", user.name));
    site.desk.write("work/manifests/db.yaml", db.replace(&setup.0, &setup.1));
    site.terminal.prepare("abide apply manifests --yes");
    chown(site.desk.path("db/db.log"), Some(0), Some(0)).expect("an owner");
    site.desk.write("work/new.yaml", format!("users: [{}]\npaths: [{here}/db]\n", user.name));
    for (quoted, real) in [
        ("/var/lib/abide-agent", format!("{here}/agent")),
        ("/run/api/api.pid", format!("{here}/run/api.pid")),
        ("/var/log/db.log", format!("{here}/db/db.log")),
        ("\"db\"", format!("{:?}", user.name)),
    ] {
        site.desk.rename(quoted, real);
    }
    site.run(&check);
}
