//! Inventory: loads manifests with the library and lists the processes of each host.
//!
//! `cargo run --example inventory -- manifests`

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use abide::manifest::{self, Limits};

fn main() -> ExitCode {
    let paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let loaded = manifest::load(&paths, &Limits::default());
    for problem in &loaded.problems {
        eprintln!("{}:{}: {}", problem.file, problem.line, problem.message);
    }
    let mut hosts: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for (key, want) in &loaded.desired.instances {
        let line = format!("{}: {} ({})", key.process(), want.origin.state.word(), want.origin.place);
        hosts.entry(key.host.clone()).or_default().push(line);
    }
    for (host, processes) in hosts {
        println!("{host}\n  {}", processes.join("\n  "));
    }
    if loaded.errors() > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
