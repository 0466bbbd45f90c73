//! A site of real services from creation to removal: nginx, redis, a web server that starts slowly, a migration and a scheduled
//! job. Every command counts itself, so that each stage shows exactly the operations that it needs.

use std::time::{Duration, Instant};

use crate::apply::KillOnDrop;
use crate::fixtures::machine::Machine;
use crate::fixtures::manifest::Manifest;
use crate::process_tree::{get, port};
use crate::support::{needs, until};
use crate::system::{is_alive, kill};
use crate::watch::{read_log, stop_directly, watch};

/// How the manifests are applied.
enum Driver {
    Apply,
    Watch(Option<KillOnDrop>),
}

struct Site {
    machine: Machine,
    driver: Driver,
    /// Ports of nginx, redis and the web server.
    ports: [u16; 3],
    /// Operations that earlier stages have counted.
    counted: usize,
    begin: Instant,
}

impl Site {
    fn new(driver: Driver) -> Site {
        let machine = Machine::new();
        std::fs::create_dir_all(machine.path("run")).expect("a folder");
        let site =
            Site { machine, driver, ports: [port(), port(), port()], counted: 0, begin: Instant::now() };
        site.nginx("one");
        site.redis(1);
        site.migrate(1);
        site.web(1, 200);
        site.job("* * * * *");
        site
    }

    fn config(&self, name: &str, port: u16, answer: &str) -> String {
        let file = self.machine.path(&format!("{name}.conf"));
        let at = |name: &str| self.machine.path(name).display().to_string();
        let config = format!(
            "daemon off;\npid {};\nerror_log {} notice;\nevents {{}}\nhttp {{ access_log off; \
             client_body_temp_path {tmp}; proxy_temp_path {tmp}; fastcgi_temp_path {tmp}; uwsgi_temp_path {tmp}; \
             scgi_temp_path {tmp}; server {{ listen 127.0.0.1:{port}; location / {{ return {answer}; }} }} }}\n",
            at(&format!("run/{name}.nginx")),
            at(&format!("{name}-error.log")),
            tmp = at(&format!("{name}-tmp")),
        );
        std::fs::write(&file, config).expect("a file");
        file.display().to_string()
    }

    fn foreground(&self, name: &str, program: &str, start: &str) -> Manifest {
        self.machine
            .manifest(name)
            .identity("proc_name", program)
            .control("start_mode", "foreground")
            .start_cmd(start)
            .stop_cmd(&format!("echo stop {name} >> operations; kill $ABIDE_PID"))
            .monitor("start_check_secs", 1)
    }

    /// A changed configuration reloads it.
    fn nginx(&self, text: &str) {
        let file = self.config("nginx", self.ports[0], &format!("200 {text}"));
        let output = std::process::Command::new("md5sum").arg(&file).output().expect("md5sum");
        let md5 = String::from_utf8_lossy(&output.stdout[..32]).into_owned();
        let start = format!("echo start nginx >> operations; exec nginx -c {file}");
        let manifest = self
            .foreground("nginx", "nginx", &start)
            .control("reload_cmd", "echo reload nginx >> operations; kill -HUP $ABIDE_PID")
            .spec("configmap", &format!("[{{path: {file}, md5: {md5}}}]"));
        self.machine.declare("nginx", manifest);
    }

    fn redis(&self, version: u32) {
        let port = self.ports[1];
        let start = format!(
            "echo start redis {version} >> operations; exec redis-server --port {port} --save '' --appendonly no \
             --databases {}",
            15 + version
        );
        let health = format!("{{cmd: 'redis-cli -p {port} ping', interval: 1s, start_period: 20}}");
        self.machine
            .declare("redis", self.foreground("redis", "redis-server", &start).spec("health", &health));
    }

    fn migrate(&self, version: u32) {
        let start = format!("sleep 1; echo run migrate {version} >> operations; touch migrated");
        let manifest = self
            .machine
            .manifest("migrate")
            .control("start_mode", "foreground")
            .start_cmd(&start)
            .monitor("auto_type", 2);
        self.machine.declare("migrate", manifest);
    }

    /// It starts slowly, and needs the migration and redis. A bad version answers with another status.
    fn web(&self, version: u32, status: u32) {
        let (file, port) =
            (self.config("web", self.ports[2], &format!("{status} v{version}")), self.ports[2]);
        let file = {
            let versioned = self.machine.path(&format!("web-{version}.conf"));
            std::fs::rename(file, &versioned).expect("a file");
            versioned.display().to_string()
        };
        let start = format!(
            "echo start web {version} >> operations; test -e migrated || echo too early >> operations; sleep 2; \
             exec nginx -c {file}"
        );
        let health =
            format!("{{http: 'http://127.0.0.1:{port}/', interval: 1s, start_period: 8, retries: 2}}");
        let manifest = self
            .foreground("web", "nginx", &start)
            .depends_on(&["migrate", "redis"])
            .field("rollout", "{batch: 1, auto_rollback: true}")
            .spec("health", &health);
        self.machine.declare("web", manifest);
    }

    fn job(&self, rule: &str) {
        let manifest = self
            .machine
            .manifest("job")
            .control("start_mode", "foreground")
            .start_cmd("echo run >> runs")
            .monitor("auto_type", 0)
            .monitor("crontab_rule", format!("\"{rule}\""));
        self.machine.declare("job", manifest);
    }

    /// Starts watching, if watch drives this site.
    fn begin(&mut self) {
        if let Driver::Watch(running @ None) = &mut self.driver {
            *running = Some(watch(&self.machine, "watch.log", &["--prune", "--interval", "2s"]));
        }
    }

    /// Lets the driver apply the manifests. An apply ends with this code.
    fn apply(&self, code: i32) {
        if let Driver::Apply = self.driver {
            let (ended, out, err) = self.machine.apply(&["--prune", "--timeout", "90s"]);
            assert_eq!(ended, code, "{out} {err}");
        }
    }

    fn operations(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.machine.path("operations")).unwrap_or_default();
        text.lines().skip(self.counted).map(str::to_owned).collect()
    }

    /// Waits until these operations have run since the last stage, in any order, and until nothing is left to do: no other
    /// operation runs.
    fn expect(&mut self, stage: &str, wanted: &[&str]) {
        let sorted = |mut all: Vec<String>| {
            all.sort();
            all
        };
        let wanted = sorted(wanted.iter().map(|text| (*text).to_owned()).collect());
        until(&format!("{stage}: {wanted:?}"), || self.operations().len() >= wanted.len());
        self.rest(stage);
        assert_eq!(sorted(self.operations()), wanted, "{stage}: {}", read_log(&self.machine, "watch.log"));
        self.counted += wanted.len();
    }

    /// Waits until a plan has no steps.
    fn rest(&self, stage: &str) {
        let mut args = vec!["plan", "m", "--detailed-exitcode", "--prune"];
        if stage == "rollback" {
            // A pin is in force: the manifests differ from it on purpose.
            args = vec!["get", "processes"];
        }
        until(&format!("{stage}: nothing is left to do"), || self.machine.run(&args).0 == 0);
        if let Driver::Watch(_) = self.driver {
            // A whole interval of the controller.
            std::thread::sleep(Duration::from_millis(2_500));
        }
    }

    fn pid(&self, name: &str) -> u32 {
        self.machine.pids().get(name).map_or(0, |pid| *pid as u32)
    }

    fn answers(&self) -> (Option<String>, Option<String>) {
        (get(self.ports[0]), get(self.ports[2]))
    }

    fn system(&self) -> u32 {
        let text = std::fs::read_to_string(self.machine.path(".abide-home/system.lock")).expect("a pid");
        text.split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("a pid")
    }
}

fn is_possible() -> bool {
    needs("nginx") && needs("redis-server") && needs("redis-cli")
}

#[test]
fn apply_takes_a_site_through_its_life() {
    if is_possible() {
        life(Site::new(Driver::Apply));
    }
}

#[test]
fn watch_takes_a_site_through_its_life() {
    if is_possible() {
        life(Site::new(Driver::Watch(None)));
    }
}

fn life(mut site: Site) {
    site.begin();
    create(&mut site);
    change(&mut site);
    bad_change(&mut site);
    roll_back(&mut site);
    lose_the_host(&mut site);
    drift(&mut site);
    prune(&mut site);
    let runs = std::fs::read_to_string(site.machine.path("runs")).unwrap_or_default().lines().count();
    let minutes = site.begin.elapsed().as_secs() / 60 + 1;
    assert!(runs as u64 <= minutes, "the job ran {runs} times in {minutes} minutes");
}

fn create(site: &mut Site) {
    site.apply(0);
    let first = ["start nginx", "start redis 1", "run migrate 1", "start web 1"];
    until("everything has started", || site.operations().len() >= first.len());
    let order = site.operations();
    let at = |what: &str| order.iter().position(|line| line == what);
    assert!(at("run migrate 1") < at("start web 1") && at("start redis 1") < at("start web 1"), "{order:?}");
    site.expect("create", &first);
    let both = (Some("one".to_owned()), Some("v1".to_owned()));
    until("both answer", || site.answers() == both);
}

fn change(site: &mut Site) {
    let (nginx, redis) = (site.pid("nginx"), site.pid("redis"));
    site.nginx("two");
    site.migrate(2);
    site.web(2, 200);
    site.job("*/2 * * * *");
    site.apply(0);
    site.expect("change", &["reload nginx", "run migrate 2", "stop web", "start web 2"]);
    assert_eq!((site.pid("nginx"), site.pid("redis")), (nginx, redis), "a reload keeps the pid");
    let both = (Some("two".to_owned()), Some("v2".to_owned()));
    until("both answer", || site.answers() == both);
}

fn bad_change(site: &mut Site) {
    site.web(3, 500);
    site.apply(7);
    let back = ["stop web", "start web 3", "stop web", "start web 2"];
    until("it is rolled back", || site.operations().len() >= back.len());
    until("the old version answers", || get(site.ports[2]).as_deref() == Some("v2"));
    // The repaired manifests need nothing more.
    site.web(2, 200);
    site.apply(0);
    site.expect("bad change", &back);
}

fn roll_back(site: &mut Site) {
    let web = site.pid("web");
    site.redis(2);
    site.apply(0);
    site.expect("redis 2", &["stop redis", "start redis 2"]);
    let (code, out, err) = site.machine.run(&["rollback", "--to", "previous", "--yes"]);
    assert_eq!(code, 0, "{out} {err}");
    site.expect("rollback", &["stop redis", "start redis 1"]);
    // The manifests follow, and the pin ends.
    site.redis(1);
    site.apply(0);
    let (code, _, err) = site.machine.run(&["rollback", "--unpin"]);
    assert!(code == 0 || err.contains("no revision"), "{code} {err}");
    site.expect("unpinned", &[]);
    assert_eq!(site.pid("web"), web, "a dependent is not restarted");
}

/// The gateway and the agent die, and so does one service before they are back.
fn lose_the_host(site: &mut Site) {
    let (nginx, web, redis) = (site.pid("nginx"), site.pid("web"), site.pid("redis"));
    kill(site.system(), "KILL");
    kill(redis, "KILL");
    assert!(is_alive(nginx) && is_alive(web), "processes outlive their agent");
    if let Driver::Watch(_) = site.driver {
        until("watch has restarted the system", || site.pid("nginx") == nginx);
    }
    site.apply(0);
    site.expect("host loss", &["start redis 1"]);
    assert_eq!((site.pid("nginx"), site.pid("web")), (nginx, web));
}

fn drift(site: &mut Site) {
    let nginx = site.pid("nginx");
    kill(nginx, "KILL");
    until("nginx is relaunched", || ![0, nginx].contains(&site.pid("nginx")));
    site.expect("a killed service", &["start nginx"]);
    stop_directly(&site.machine, "redis");
    until("redis is stopped", || site.operations().contains(&"stop redis".to_owned()));
    if let Driver::Apply = site.driver {
        until("it does not run", || site.pid("redis") == 0);
    }
    site.apply(0);
    site.expect("a stopped service", &["stop redis", "start redis 1"]);
}

fn prune(site: &mut Site) {
    let (nginx, redis) = (site.pid("nginx"), site.pid("redis"));
    std::fs::remove_file(site.machine.path("m/web.yaml")).expect("a manifest");
    site.apply(0);
    site.expect("prune", &["stop web"]);
    assert!(!site.machine.rows().contains_key("web"));
    assert_eq!((site.pid("nginx"), site.pid("redis")), (nginx, redis));
    assert_eq!(get(site.ports[2]), None);
}
