//! Hostile manifests: each gives a problem with a location, within limits of time and memory, and no panic.
//!
//! Memory is bounded by the kernel: 224 MB of data, which leaves 32 MB of 256 MB for the resident code. Address space is no
//! bound, since it contains all code of a debug build. Time is bounded by a deadline that only a runaway reaches.

use std::path::Path;
use std::process::Output;

use crate::support::{Tree, command, stdout};

/// Runs `validate -o json` with 224 MB of data and kills it after a minute.
fn validate(file: &Path) -> Output {
    let program = command(&["validate", "-q", "-o", "json"], Path::new("/"));
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "ulimit -d 229376; exec timeout -k 1 60 \"$0\" \"$@\""]);
    shell.arg(program.get_program()).args(program.get_args()).arg(file);
    shell.output().expect("the program runs")
}

#[track_caller]
fn refused(name: &str, content: impl AsRef<[u8]>, code: &str) {
    let tree = Tree::new(&[(name, content)]);
    expect(&validate(&tree.path().join(name)), name, code);
}

#[track_caller]
fn expect(output: &Output, name: &str, code: &str) {
    let out = stdout(output);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(65), "{name}: {} {err}", &out[..out.len().min(500)]);
    let problems: Vec<serde_json::Value> = serde_json::from_str(&out).expect("JSON");
    let found = |p: &serde_json::Value| {
        p["code"] == code && p["line"].as_u64() > Some(0) && p["column"].as_u64() > Some(0)
    };
    assert!(problems.iter().any(found), "{name}: {}", &out[..out.len().min(500)]);
    assert!(!err.contains("panic"), "{name}: {err}");
}

#[test]
fn e0111_depth() {
    for (name, unit) in [
        ("a.yaml", "["),
        ("a.yaml", "{a: "),
        ("a.yaml", "- "),
        ("a.yaml", "? "),
        ("a.json", "["),
        ("a.json", "{\"a\":"),
    ] {
        refused(name, unit.repeat(1_000_000), "E0111");
    }
    refused("a.yaml", format!("meta: {}", "{a: ".repeat(1_000_000)), "E0111");
}

#[test]
fn e0111_aliases() {
    let laughs: String = (1..20)
        .map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 9].join(",")))
        .fold("a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned(), |all, line| all + &line);
    refused("a.yaml", laughs, "E0111");
    refused("a.yaml", format!("x: &x 1\ny: [{}1]\n", "*x,".repeat(200_000)), "E0111");
    let nested: String = (0..60).map(|n| format!("&a{n} [")).collect();
    refused("a.yaml", nested + &"1,".repeat(100_000) + &"]".repeat(60), "E0111");
    refused("a.yaml", "a: &a [*a]\n", "E0102");
}

#[test]
fn e0111_number_and_size() {
    refused("a.yaml", "---\n".repeat(1_000_000), "E0111");
    refused("a.yaml", "--- {}\n".repeat(1_000_000), "E0111");
    refused("a.yaml", format!("hosts: [{}]", "1,".repeat(7_000_000)), "E0111");
    refused("a.yaml", format!("hosts: [{}]", "1,".repeat(25_000_000)), "E0111");
    refused("a.yaml", format!("a: \"{}\"", "a".repeat(30_000_000)), "E0111");
    refused("a.json", format!("{{\"a\": \"{}\"}}", "a".repeat(30_000_000)), "E0111");
}

#[test]
fn e0111_a_gigabyte_is_not_even_opened() {
    let tree = Tree::new::<&str>(&[]);
    for (name, bytes) in [("one.yaml", 1 << 30), ("many.yaml", 1u64 << 36)] {
        let path = tree.path().join(name);
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).expect("a sparse file");
        expect(&validate(&path), name, "E0111");
    }
}

#[test]
fn e0114_too_many_problems() {
    refused("a.yaml", (0..400_000).fold(String::new(), |all, n| all + &format!("k{n}: 1\n")), "E0114");
    refused("a.yaml", format!("meta:\n{}", " a: 1\n".repeat(100_000)), "E0114");
    refused("a.json", format!("{{\"meta\":{{{}}}}}", vec!["\"a\":1"; 100_000].join(",")), "E0114");
    refused("a.yaml", format!("hosts: [{}]", "1,".repeat(500_000)), "E0114");
    let hosts = "- {ip: x, bk_cloud_id: 0}\n".repeat(50_000);
    refused("a.yaml", format!("meta: {{namespace: a, name: b}}\nhosts:\n{hosts}"), "E0114");
}

#[test]
fn odd_repetitions() {
    for (unit, code) in [
        ("&a ", "E0101"),
        ("!a ", "E0101"),
        ("*", "E0101"),
        ("&", "E0101"),
        (": ", "E0111"),
        ("%a\n", "E0101"),
        ("'", "E0103"),
        ("\"", "E0101"),
        ("`", "E0101"),
        ("|\n", "E0103"),
    ] {
        refused("a.yaml", unit.repeat(300_000), code);
    }
    refused("a.yaml", format!("\"{}\": 1", "a".repeat(1_000_000)), "E0101");
    refused("a.yaml", format!("a: \"{}", "x\n".repeat(1_000_000)), "E0101");
    refused("a.yaml", format!("a: |\n{}", " \n".repeat(1_000_000)), "E0102");
}

#[test]
fn long_chains_and_circles_do_not_recurse() {
    let link = |n: u32| {
        let next = (n + 1) % 20_000;
        format!(
            "---\nmeta: {{namespace: a, name: p{n}}}\nhosts: [{{ip: 10.0.0.1, bk_cloud_id: 0}}]\ndepends_on: [p{next}]\nspec:\n  identity: {{proc_name: p, setup_path: /p, pid_path: /p, user: u, value_key: p{n}}}\n  control: {{start_cmd: p}}\n  monitor_policy: {{auto_type: 1}}\n"
        )
    };
    refused("a.yaml", (0..20_000).map(link).collect::<String>(), "E0406");
}

#[test]
fn many_small_documents_cost_linear_time() {
    let many =
        |count: usize, document: &dyn Fn(usize) -> String| (0..count).map(document).collect::<String>();
    // Directives keep a file in one piece; the documents are counted all the same.
    refused("a.yaml", format!("%YAML 1.2\n{}", "---\na: 1\n".repeat(500_000)), "E0111");
    refused("a.yaml", "- {}\n".repeat(150_000), "E0111");
    refused("a.json", "1 ".repeat(5_000_000), "E0111");
    refused("a.yaml", "--- {}\n".repeat(40_000), "E0114");
    let policies = many(30_000, &|n| format!("--- {{kind: Policy, meta: {{name: p{n}}}}}\n"));
    let processes = many(5_000, &|n| format!("--- {{kind: Process, meta: {{namespace: a, name: p{n}}}}}\n"));
    refused("a.yaml", policies + &processes, "E0104");
    let defaults = "--- {kind: Defaults, spec: {control: {start_cmd: a}}}\n".repeat(5_000);
    refused("a.yaml", defaults + "--- {kind: Process, meta: {namespace: a, name: b}}\n", "E0104");
    refused(
        "a.yaml",
        many(300, &|n| {
            format!("--- {{kind: Process, meta: {{namespace: a, name: b{n}}}, instances: 1000000}}\n")
        }),
        "E0104",
    );
    refused("a.yaml", "--- {meta: {namespace: a, name: b}, depends_on: [b]}\n".repeat(20_000), "E0114");
    let groups = many(5_000, &|n| format!("--- {{kind: HostGroup, meta: {{name: g{n}}}, hosts: []}}\n"));
    let lost = many(5_000, &|n| {
        format!("--- {{kind: Process, meta: {{namespace: a, name: p{n}}}, hosts: [{{group: x{n}}}]}}\n")
    });
    refused("a.yaml", groups + &lost, "E0403");
}

/// Right below the limit of instances: none of them is made to be counted and compared.
#[test]
fn a_million_instances_stay_within_the_memory_limit() {
    let many =
        crate::support::with("spec:", "instances: 999999\nspec:").replace("./api", "\"./api ${instance}\"");
    refused("a.yaml", &many, "E0402");
    let own = many.replace("/run/api.pid", "\"/run/${instance}.pid\", value_key: \"api-${instance}\"");
    let tree = Tree::new(&[
        ("a.yaml", &own),
        ("b.yaml", &own.replace("name: api}", "name: b}").replace("999999", "1")),
    ]);
    expect(&validate(tree.path()), "b.yaml", "E0402");
    let tree = Tree::new(&[("a.yaml", &own)]);
    let output = validate(&tree.path().join("a.yaml"));
    assert_eq!((output.status.code(), stdout(&output).trim()), (Some(0), "[]"));
}

/// Right below the limits of a file's size and of its documents.
#[test]
fn the_largest_allowed_input_stays_within_the_memory_limit() {
    refused("a.yaml", "\n".repeat(60 << 20), "E0111");
    for document in ["--- {}\n", "---\na: 1\n", "--- {kind: Process, meta: {namespace: a, name: b}}\n"] {
        refused("a.yaml", document.repeat(99_999), "E0114");
    }
}

/// Bytes that are not text: a replacement character is three times as long as the byte that it replaces.
#[test]
fn invalid_bytes_stay_within_the_memory_limit() {
    let most = 60 << 20;
    for unit in [&b"\xff"[..], b"\xff\n", b"\xed\xa0\x80", b"\0", b"\xfe\xff\0a", b"\xff\xfea\0"] {
        refused("a.yaml", unit.repeat(most / unit.len()), "E0112");
    }
    refused("a.yaml", [&b"\xef\xbb\xbf"[..], &vec![0xff; most]].concat(), "E0113");
    refused("a.yaml", [&"a: é\n".repeat(most / 6).into_bytes()[..], b"\xff"].concat(), "E0112");
    for unit in ["a", "[", "\t", "- ", "{a: ", "*a,"] {
        refused("a.yaml", format!("a: &a [{}", unit.repeat(most / unit.len())), "E0111");
    }
}

#[test]
fn an_oversized_command_is_not_copied_per_instance() {
    let long = format!("\"{} ${{instance}}\"", "a".repeat(1_000_000));
    let text = crate::support::with("./api", &long).replace("spec:", "instances: 1000\nspec:");
    refused("a.yaml", text.replace("/run/api.pid", "/run/api.pid, value_key: \"${instance}\""), "E0111");
}
