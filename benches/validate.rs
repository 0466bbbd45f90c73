//! Validation benchmark: `validate` compared with the YAML crate alone, on 10,000 documents in the shape of a
//! register_proc_info body.
//!
//! `cargo bench --bench validate` prints, for the same bytes as one file and as 10,000 files: the best of several
//! runs of the YAML crate deserialising them on one core, of loading and checking them, the ratio, and the peak
//! memory of a process that does nothing else. The 10,000 files are then the base of two overlays, both of which
//! patch every process: the last line compares that with loading the files alone.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use abide::manifest::document::Document;
use abide::manifest::{self, Limits};
use serde::Deserialize;

const DOCUMENTS: usize = 10_000;
const RUNS: usize = 10;
/// Asks this program to load a path and print its memory.
const PEAK: &str = "--peak-of";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some(at) = args.iter().position(|arg| arg == PEAK) {
        return tell_peak(Path::new(&args[at + 1]));
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (one, many) = (folder.path().join("one.yaml"), folder.path().join("many"));
    std::fs::create_dir(&many).expect("a folder");
    let documents: Vec<String> = (0..DOCUMENTS).map(document).collect();
    std::fs::write(&one, documents.concat()).expect("a file");
    for (nth, document) in documents.iter().enumerate() {
        std::fs::write(many.join(format!("{nth:05}.yaml")), document).expect("a file");
    }
    let bytes: usize = documents.iter().map(String::len).sum();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    println!("{DOCUMENTS} documents, {:.1} MB, {cores} cores, best of {RUNS} runs", bytes as f64 / 1e6);

    let text = documents.concat();
    let alone_one = best(|| yaml_alone(&text));
    let alone_many = best(|| files(&many).iter().map(|path| yaml_alone(&read(path))).sum());
    for (name, path, alone) in [("one file", &one, alone_one), ("10,000 files", &many, alone_many)] {
        let whole = best(|| loaded(path));
        let ratio = whole.as_secs_f64() / alone.as_secs_f64();
        let peak = peak_of(path);
        println!(
            "{name:<13} yaml alone, one core {alone:>9.1?}   validate {whole:>9.1?}   ratio {ratio:.2}   peak {peak}"
        );
    }
    let top = overlays(folder.path());
    let (flat, layered) = (best(|| loaded(&many)), best(|| loaded(&top) - OVERLAYS));
    println!(
        "two overlays  flat {flat:>9.1?}   layered {layered:>9.1?}   ratio {:.2}   peak {}",
        layered.as_secs_f64() / flat.as_secs_f64(),
        peak_of(&top)
    );
}

/// Documents that the overlays add.
const OVERLAYS: usize = 2;

/// Writes two overlays of `many`, and returns the directory of the outer one.
fn overlays(folder: &Path) -> PathBuf {
    let overlay = |base: &str, patch: &str| {
        format!(
            "kind: Overlay\nbase: {base}\nvars: {{size: 1}}\npatches:\n- match: {{namespace: gse}}\n  patch: {patch}\n"
        )
    };
    let (inner, top) = (folder.join("inner"), folder.join("top"));
    for (dir, text) in [
        (&inner, overlay("../many", "{meta: {labels: {tier: front}}, spec: {resource: {cpu: 20}}}")),
        (&top, overlay("../inner", "{spec: {control: {stop_cmd: ./halt.sh}, env: {SIZE: \"${size}\"}}}")),
    ] {
        std::fs::create_dir(dir).expect("a folder");
        std::fs::write(dir.join("overlay.yaml"), text).expect("a file");
    }
    top
}

fn yaml_alone(text: &str) -> usize {
    let documents =
        serde_yaml::Deserializer::from_str(text).map(|d| Document::deserialize(d).expect("a document"));
    documents.count()
}

fn loaded(path: &Path) -> usize {
    let loaded = manifest::load(&[path.to_path_buf()], &Limits::default());
    assert_eq!(loaded.problems, []);
    loaded.documents.len()
}

fn best(run: impl Fn() -> usize) -> Duration {
    let once = || {
        let begin = Instant::now();
        assert_eq!(run(), DOCUMENTS);
        begin.elapsed()
    };
    (0..RUNS).map(|_| once()).min().unwrap_or_default()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path()).collect()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("a file")
}

fn peak_of(path: &Path) -> String {
    let program = std::env::current_exe().expect("this program");
    let output = Command::new(program).arg(PEAK).arg(path).output().expect("it runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn tell_peak(path: &Path) {
    assert!(loaded(path) >= DOCUMENTS);
    let status = read(Path::new("/proc/self/status"));
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("unknown");
    println!("{}", peak.trim());
}

/// A register_proc_info body with every field of its documentation, as block YAML.
fn document(nth: usize) -> String {
    let mut text = String::from("---\n");
    let labels = "  labels:\n    proc_name: proc-test\n";
    let _ = write!(text, "meta:\n  namespace: gse\n  name: proc-test-{nth:05}\n{labels}");
    text.push_str("hosts:\n  - ip: 10.0.0.1\n    bk_cloud_id: 1\n    bk_supplier_id: 2\nspec:\n");
    let _ = write!(text, "  identity:\n    index_key: \"{nth}\"\n    proc_name: proc-test\n");
    for (name, value) in [
        ("setup_path", "/data/gsetest/"),
        ("pid_path", "/data/gsetest/proc-test.pid"),
        ("config_path", "/data/gsetest/proc-test.conf"),
        ("log_path", "/data/gsetest/logs/"),
        ("user", "root"),
    ] {
        let _ = writeln!(text, "    {name}: {value}");
    }
    text.push_str("  control:\n");
    for name in ["start", "stop", "restart", "reload", "kill", "version", "health"] {
        let _ = writeln!(text, "    {name}_cmd: ./{name}.sh");
    }
    text.push_str("  resource:\n    cpu: 10.0\n    mem: 10.0\n    fd: 10000\n    disk: 100\n    net: 0\n");
    text.push_str("  monitor_policy:\n    auto_type: 1\n    start_check_secs: 5\n    stop_check_secs: 5\n");
    text.push_str("    start_retries: 3\n    start_interval: 20\n    crotab_rule: \"\"\n");
    text.push_str(
        "  warn_report_policy:\n    report_id: 0\n  configmap:\n    - path: \"\"\n      md5: \"\"\n",
    );
    text
}
