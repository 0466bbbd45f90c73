//! Watch benchmark: `abide watch` over 10,000 files of one process each, all registered at a real gateway.
//!
//! `cargo bench --bench watch` prints one JSON object: the processor's share and the memory of a watch with nothing to do,
//! the same for its gateway, and the time from one saved file to the first write of its process at the gateway,
//! beyond the debounce.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

const PROCESSES: usize = 10_000;
/// Two of the usual intervals.
const IDLE: Duration = Duration::from_secs(60);
const DEBOUNCE: Duration = Duration::from_millis(200);
const CHANGES: usize = 11;

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    (0..PROCESSES).for_each(|nth| write(here, nth, 0));
    let applied = command(here, &["apply", "m", "--yes"]).status().expect("it runs");
    assert!(applied.success(), "{applied}");
    let log = std::fs::File::create(here.join("log")).expect("a file");
    let both = log.try_clone().expect("a file");
    let begin = Instant::now();
    let mut watch = command(here, &["watch", "m", "--listen", "127.0.0.1:0"]);
    let watch = Watch(watch.stdout(both).stderr(log).spawn().expect("it starts"), here);
    until("it rests", || std::fs::read_to_string(here.join("log")).unwrap_or_default().contains("converged"));
    let first = begin.elapsed();
    // The files are all new; from the second look on they are known.
    std::thread::sleep(Duration::from_secs(5));
    let system = system(here);
    let (watched, served) = (spent(watch.0.id()), spent(system));
    std::thread::sleep(IDLE);
    let share = |before: Duration, pid: u32| {
        ((spent(pid) - before).as_secs_f64() / IDLE.as_secs_f64() * 1e4).round() / 100.0
    };
    let (watched, served) = (share(watched, watch.0.id()), share(served, system));
    let rss = memory(watch.0.id(), "VmRSS:");
    let mut took: Vec<Duration> = (1..=CHANGES).map(|version| change(here, version)).collect();
    took.sort();
    let peak = memory(watch.0.id(), "VmHWM:");
    drop(watch);
    let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
    println!(
        "{:#}",
        json!({
            "processes": PROCESSES,
            "first_converged_ms": ms(first),
            "idle_cpu_percent": {"watch": watched, "gateway_and_agent": served},
            "rss_mb": {"idle": rss, "peak": peak},
            "saved_to_first_write_beyond_debounce_ms":
                {"median": ms(took[CHANGES / 2]), "longest": ms(took[CHANGES - 1])},
        })
    );
}

fn write(here: &Path, nth: usize, version: usize) {
    let (folder, here) = (here.join(format!("m/{}", nth / 100)), here.display());
    std::fs::create_dir_all(&folder).expect("a folder");
    let text = format!(
        "apiVersion: abide/v1\nkind: Process\nstate: stopped\nmeta: {{namespace: bench, name: p{nth}}}\n\
         hosts: [{{ip: 127.0.0.1, bk_cloud_id: 0}}]\nspec:\n  identity: {{proc_name: sleep, setup_path: /, \
         pid_path: {here}/run/{nth}.pid, value_key: p{nth}}}\n  control: {{start_mode: foreground, start_cmd: /bin/sleep \
         {version}}}\n  monitor_policy: {{auto_type: 1, start_check_secs: 0}}\n"
    );
    std::fs::write(folder.join(format!("p{nth}.yaml")), text).expect("a file");
}

/// One file is saved; how long until the gateway has it, beyond the debounce.
fn change(here: &Path, version: usize) -> Duration {
    let nth = version * 97;
    let store = rusqlite::Connection::open(here.join("home/gateway/store.db")).expect("a store");
    let mut asked =
        store.prepare("SELECT changed FROM entry WHERE key LIKE ?1 || '%' AND key > ?1").expect("a question");
    let key = format!("reg/bench/p{nth}/");
    let mut changed = || asked.query_row([&key], |row| row.get::<_, i64>(0)).expect("it is registered");
    let before = changed();
    write(here, nth, version);
    let begin = Instant::now();
    until("the gateway has it", || changed() != before);
    let took = begin.elapsed();
    // The next one finds it at rest.
    std::thread::sleep(Duration::from_secs(2));
    took.saturating_sub(DEBOUNCE)
}

fn command(here: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_abide"));
    command
        .args(args)
        .current_dir(here)
        .env("ABIDE_HOME", here.join("home"))
        .env("ABIDE_KEY_FILE", here.join("key"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(120), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The local system, gateway and agent, by its command line.
fn system(here: &Path) -> u32 {
    let home = here.join("home").display().to_string();
    let processes = std::fs::read_dir("/proc").expect("processes").flatten().map(|entry| entry.path());
    let has = |path: &Path, what: &str, word: &str| {
        String::from_utf8_lossy(&std::fs::read(path.join(what)).unwrap_or_default()).contains(word)
    };
    let is_it = |path: &PathBuf| has(path, "cmdline", "--background") && has(path, "environ", &home);
    let found = processes.into_iter().find(is_it).expect("a system");
    found.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok()).expect("a pid")
}

/// Processor time so far.
fn spent(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let (_, rest) = stat.rsplit_once(") ").expect("a name");
    let fields: Vec<u64> =
        rest.split(' ').skip(11).take(2).map(|field| field.parse().expect("ticks")).collect();
    let ticks = rustix::param::clock_ticks_per_second();
    Duration::from_secs_f64(fields.iter().sum::<u64>() as f64 / ticks as f64)
}

fn memory(pid: u32, what: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix(what)).expect("a line");
    let kb: f64 = line.split_whitespace().next().and_then(|kb| kb.parse().ok()).expect("a number");
    (kb * 1024.0 / 1e5).round() / 10.0
}

/// Ended, and the system below it, whatever happens.
struct Watch<'a>(Child, &'a Path);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = command(self.1, &["down"]).status();
    }
}
