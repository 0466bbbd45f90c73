//! Trust in config files: a file found in the current directory sets no credentials, state or targets until its
//! content is trusted.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::support::{GOOD, Tree, command, stderr, stdout};
use crate::system::System;

/// A checkout with a config file, and a home of the user.
struct Checkout {
    tree: Tree,
    system: System,
}

impl Checkout {
    fn new() -> Checkout {
        let manifest = GOOD.replace("10.0.0.1", "127.0.0.1").replace("user: app", "user: nobody");
        Checkout { tree: Tree::new(&[("w/m/api.yaml", manifest.as_str())]), system: System::new() }
    }

    fn target(&self, name: &str, secret: &str) -> String {
        let address = self.system.server.address;
        format!(
            "targets: {{{name}: {{url: \"http://{address}\", dialect: abide, auth: {{app_code: all, app_secret: {secret}}}}}}}\n"
        )
    }

    fn here(&self) -> std::path::PathBuf {
        self.tree.path().join("w")
    }

    /// A user who just entered the checkout.
    fn run_in(&self, here: &Path, args: &[&str]) -> Output {
        command(args, here)
            .env_remove("ABIDE_CONFIG")
            .env("ABIDE_HOME", self.tree.path().join("abide-home"))
            .env("HOME", self.tree.path().join("home"))
            .env("THE_SECRET", "s3cret")
            .stdin(Stdio::null())
            .output()
            .expect("it runs")
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let output = self.run_in(&self.here(), args);
        (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
    }

    fn refused(&self, args: &[&str], says: &str) {
        let (code, out, err) = self.run(args);
        assert!(code == 64 && err.contains(says), "{args:?}: {code} {out}{err}");
        assert!(err.contains("`abide config trust`") && err.contains("--config abide.yaml"), "{err}");
    }
}

const PLAN: [&str; 4] = ["plan", "m", "--target", "it"];

#[test]
fn a_discovered_file_gets_no_credentials_until_its_content_is_trusted() {
    let checkout = Checkout::new();
    for secret in ["{env: THE_SECRET}", "{file: /proc/self/environ}"] {
        checkout.tree.write("w/abide.yaml", checkout.target("it", secret));
        let says = "target \"it\": its credentials cannot be used: abide.yaml was found in the current directory and is not trusted";
        for args in
            [&PLAN[..], &["get", "processes", "--target", "it"], &["pause", "--all", "--target", "it"]]
        {
            checkout.refused(args, says);
        }
    }
    // A file that is named was chosen.
    checkout.tree.write("w/abide.yaml", checkout.target("it", "{env: THE_SECRET}"));
    let (code, out, err) = checkout.run(&[&PLAN[..], &["--config", "abide.yaml"]].concat());
    assert!(code == 0 && out.contains("1 to start"), "{out}{err}");
    let (code, out, err) = checkout.run(&["config", "trust"]);
    assert!(code == 0 && out.contains("/w/abide.yaml (blake3 "), "{out}{err}");
    let (code, out, err) = checkout.run(&[&["-v"], &PLAN[..]].concat());
    assert!(code == 0 && out.contains("1 to start"), "{out}{err}");
    assert!(err.contains("config file in use") && err.contains("file=abide.yaml"), "{err}");
    // Another content is another file, and the same content elsewhere too.
    checkout.tree.write("w/abide.yaml", checkout.target("it", "{env: THE_SECRET}") + "# more\n");
    checkout.refused(&PLAN, "has changed since it was trusted");
    let there = checkout.tree.path().join("w2");
    std::fs::create_dir(&there).expect("a folder");
    std::fs::write(there.join("abide.yaml"), checkout.target("it", "{env: THE_SECRET}")).expect("a file");
    let output = checkout.run_in(&there, &["get", "processes", "--target", "it"]);
    assert!(stderr(&output).contains("is not trusted"), "{}", stderr(&output));
    checkout.tree.write("w/abide.yaml", checkout.target("it", "{env: THE_SECRET}"));
    assert_eq!(checkout.run(&PLAN).0, 0, "as it was trusted");
    assert_eq!(checkout.run(&["config", "untrust"]).0, 0);
    checkout.refused(&PLAN, "is not trusted");
}

#[test]
fn a_discovered_file_does_not_shadow_the_users_own() {
    let checkout = Checkout::new();
    checkout.tree.write("home/.config/abide/config.yaml", checkout.target("it", "{env: THE_SECRET}"));
    assert_eq!(checkout.run(&PLAN).0, 0, "the user's own needs no trust");
    // Another target with the same name: no server listens there.
    let hostile = checkout
        .target("it", "{env: THE_SECRET}")
        .replace(&checkout.system.server.address.to_string(), "127.0.0.1:9");
    checkout.tree.write("w/abide.yaml", &hostile);
    checkout.refused(&PLAN, "is defined in ");
    let (_, _, err) = checkout.run(&PLAN);
    assert!(err.contains("/home/.config/abide/config.yaml as well"), "{err}");
    // Settings that the found file does not have stay those of the user.
    checkout.tree.write("w/abide.yaml", hostile.replace("{it:", "{other:"));
    let (code, _, err) = checkout.run(&PLAN);
    assert_eq!(code, 0, "{err}");
    let (code, _, err) = checkout.run(&["plan", "m", "--target", "nowhere"]);
    assert!(code == 64 && err.contains("abide.yaml and ") && err.contains("it, other"), "{err}");
    // Trusted, it wins, and a failure names it.
    checkout.tree.write("w/abide.yaml", &hostile);
    assert_eq!(checkout.run(&["config", "trust", "abide.yaml"]).0, 0);
    let (code, _, err) = checkout.run(&PLAN);
    assert!(code == 69 && err.contains("hint: target it is defined in abide.yaml"), "{code} {err}");
}

#[test]
fn a_discovered_file_may_set_the_owner_but_not_the_state_store() {
    let checkout = Checkout::new();
    let elsewhere = checkout.tree.path().join("elsewhere");
    checkout.tree.write("w/abide.yaml", format!("owner: web-team\nstate: {}\n", elsewhere.display()));
    checkout.tree.write(
        "home/.config/abide/config.yaml",
        checkout.target("it", "{env: THE_SECRET}").replace("dialect: abide", "dialect: gse-v2"),
    );
    checkout.tree.write("rows.json", "[]");
    let offline = ["plan", "m", "--observed", "../rows.json", "--caps", "gse-v2", "-o", "json"];
    let (code, out, err) = checkout.run(&offline);
    let plan: Value = serde_json::from_str(&out).unwrap_or_default();
    assert!(code == 0 && plan["owner"] == "web-team", "{out}{err}");
    checkout.refused(&PLAN, "`state` cannot be used: abide.yaml was found in the current directory");
    assert!(!elsewhere.exists());
    let (code, out, _) = checkout.run(&["config", "show", "-o", "json"]);
    let files: Value = serde_json::from_str(&out).unwrap_or_default();
    assert_eq!(code, 0);
    assert_eq!((&files[0]["origin"], &files[0]["trusted"]), (&"found".into(), &false.into()), "{out}");
    assert_eq!((&files[1]["origin"], &files[1]["targets"][0]), (&"user".into(), &"it".into()), "{out}");
}

/// `--owner default` is that owner, whatever the config file says.
#[test]
fn history_shows_the_named_owner_else_that_of_the_config_file() {
    let checkout = Checkout::new();
    checkout.tree.write(
        "home/.config/abide/config.yaml",
        "owner: web-team\n".to_owned() + &checkout.target("it", "{env: THE_SECRET}"),
    );
    let history = |more: &[&str]| {
        let (code, out, err) = checkout.run(&[&["history", "--target", "it"], more].concat());
        assert_eq!(code, 0, "{err}");
        out + &err
    };
    assert!(history(&[]).contains("owner \"web-team\" has no applied revisions"));
    assert!(history(&["--owner", "default"]).contains("owner \"default\" has no applied revisions"));
}

#[test]
fn the_record_is_for_its_user_alone() {
    let checkout = Checkout::new();
    checkout.tree.write("w/abide.yaml", checkout.target("it", "{env: THE_SECRET}"));
    assert_eq!(checkout.run(&["config", "trust"]).0, 0);
    let record = checkout.tree.path().join("abide-home/trusted");
    let mode = |path: &Path| std::fs::metadata(path).expect("a file").permissions().mode() & 0o777;
    assert_eq!(mode(&record), 0o600);
    std::fs::set_permissions(&record, std::fs::Permissions::from_mode(0o622)).expect("a mode");
    let (code, _, err) = checkout.run(&PLAN);
    assert!(code == 1 && err.contains("writable by other users"), "{code} {err}");
    std::fs::set_permissions(&record, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    assert_eq!(checkout.run(&PLAN).0, 0);
    // A file that cannot be used is not trusted either.
    checkout.tree.write("w/abide.yaml", "targets: [");
    let (code, _, err) = checkout.run(&["config", "trust"]);
    assert!(code == 64 && err.contains("abide.yaml"), "{code} {err}");
    checkout.tree.write("w/abide.yaml", "# x\n".repeat(300_000));
    let (code, _, err) = checkout.run(&["get", "processes"]);
    assert!(code == 64 && err.contains("larger than"), "{code} {err}");
}

/// The verbs keep their state at the gateway: an app that is bound to namespaces needs `owners` for it.
#[test]
fn an_app_without_owners_is_refused_with_the_grant_that_it_lacks() {
    let checkout = Checkout::new();
    let apps = "apps:\n  - {code: web, secret: web-s3cret, namespaces: [web]}\n";
    let store = checkout.tree.path().join("scoped.db");
    let server = crate::server::Server::start(&store, std::time::Duration::from_secs(10), apps, "* token\n");
    checkout.tree.write("w/secret", "web-s3cret");
    let target = |code: &str| {
        let auth = format!("auth: {{app_code: {code}, app_secret: {{file: secret}}}}");
        format!("targets: {{it: {{url: \"http://{}\", dialect: abide, {auth}}}}}\n", server.address)
    };
    checkout.tree.write("w/abide.yaml", target("web"));
    assert_eq!(checkout.run(&["config", "trust"]).0, 0);
    let (code, out, err) = checkout.run(&PLAN);
    assert!(code == 77 && err.contains("app web lacks owner default"), "{code} {out}{err}");
    assert!(err.contains("`abide access check`"), "{err}");
    let (code, out, err) = checkout.run(&["get", "hosts", "--target", "it"]);
    assert_eq!(code, 0, "{out}{err}");
    let (_, out, err) = checkout.run(&["doctor", "--target", "it"]);
    assert!(out.contains("app web has no `users`"), "{out}{err}");
    checkout.tree.write("w/abide.yaml", target("wrong"));
    assert!(checkout.run(&["config", "show"]).1.contains("run `abide config trust`"));
    assert_eq!(checkout.run(&["config", "trust"]).0, 0);
    let (code, out, err) = checkout.run(&["doctor", "--target", "it"]);
    assert!(
        code == 1 && out.contains("check auth.app_code"),
        "wrong credentials are another fault: {out}{err}"
    );
}
