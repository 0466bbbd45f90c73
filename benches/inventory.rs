//! Inventory benchmark: 100,000 hosts from a CSV file and from a command that prints JSON, selected by three groups.
//!
//! `cargo bench --bench inventory` prints for each source: the best of several runs of reading the inventory, of loading
//! manifests with its hosts, and the peak memory of a process that does both once. The goal is 1 s and 200 MB.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use abide::inventory::{InventoryKind, InventorySnapshot, InventorySource};
use abide::manifest::{self, Limits, inventory};
use abide::model::Amount;

const HOSTS: u32 = 100_000;
const RUNS: usize = 5;
/// Asks this program to read a source once and print its memory.
const PEAK: &str = "--peak-of";

const MANIFESTS: &str = "\
kind: HostGroup
meta: {name: eu}
from: {inventory: it, select: 'set=eu,module in (api,worker)'}
---
kind: HostGroup
meta: {name: us}
from: {inventory: it, select: set=us}
---
kind: HostGroup
meta: {name: all}
from: {inventory: it}
---
kind: Process
meta: {namespace: web, name: api}
hosts: [{group: eu}, {group: us}]
run: ./api --port ${port}
---
kind: Process
meta: {namespace: ops, name: exporter}
hosts: [{group: all}]
run: ./exporter
";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some(at) = args.iter().position(|arg| arg == PEAK) {
        let folder = PathBuf::from(&args[at + 2]);
        load(&folder, &read(&args[at + 1], &folder));
        let status = std::fs::read_to_string("/proc/self/status").expect("a status");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
        print!("{}", peak.trim());
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let here = folder.path();
    std::fs::create_dir(here.join("m")).expect("a folder");
    std::fs::write(here.join("m/all.yaml"), MANIFESTS).expect("a file");
    let (mut csv, mut json) = ("ip,cloud,set,module,name,var.port\n".to_owned(), "[".to_owned());
    for n in 0..HOSTS {
        let ip = std::net::Ipv4Addr::from_bits(0x0a00_0001 + n);
        let (set, module) = (["eu", "us"][n as usize % 2], ["api", "worker", "db"][n as usize % 3]);
        let _ = writeln!(csv, "{ip},0,{set},{module},web{n},{}", 8000 + n % 1000);
        let comma = if n == 0 { "" } else { "," };
        let _ = write!(
            json,
            "{comma}{{\"ip\":\"{ip}\",\"set\":\"{set}\",\"module\":\"{module}\",\"name\":\"web{n}\",\"vars\":{{\"port\":{}}}}}",
            8000 + n % 1000
        );
    }
    json.push(']');
    std::fs::write(here.join("hosts.csv"), csv).expect("a file");
    std::fs::write(here.join("hosts.json"), json).expect("a file");
    println!("{HOSTS} hosts, best of {RUNS} runs");
    for name in ["file", "command"] {
        let (mut reads, mut loads) = (Duration::MAX, Duration::MAX);
        for _ in 0..RUNS {
            let begin = Instant::now();
            let snapshot = read(name, here);
            reads = reads.min(begin.elapsed());
            let begin = Instant::now();
            load(here, &snapshot);
            loads = loads.min(begin.elapsed());
        }
        let output =
            Command::new(std::env::current_exe().expect("a program")).args([PEAK, name]).arg(here).output();
        let peak = String::from_utf8(output.expect("it runs").stdout).expect("text");
        println!(
            "{name:<8} read {reads:>9.1?}   load {loads:>9.1?}   together {:>9.1?}   peak {peak}",
            reads + loads
        );
    }
}

fn read(name: &str, folder: &Path) -> InventorySnapshot {
    let kind = match name {
        "file" => InventoryKind::File(folder.join("hosts.csv")),
        _ => InventoryKind::Command(vec!["cat".to_owned(), folder.join("hosts.json").display().to_string()]),
    };
    let (interval, timeout) = (Duration::from_secs(300), Duration::from_secs(60));
    let source =
        InventorySource { name: "it".to_owned(), kind, interval, timeout, max_shrink: Amount::Count(1) };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let snapshot = runtime.block_on(source.read()).expect("hosts");
    assert_eq!(snapshot.hosts, HOSTS as usize);
    snapshot
}

fn load(folder: &Path, snapshot: &InventorySnapshot) {
    let files = inventory::stand_ins([("it", &snapshot.text)].into_iter());
    let loaded = manifest::load_with(&[folder.join("m")], &Limits::default(), &files);
    assert_eq!(loaded.problems, []);
    assert_eq!(loaded.counts.hosts, HOSTS as usize);
}
