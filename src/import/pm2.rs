//! pm2 import: `{apps: […]}` or a list of apps, as JSON or YAML, and the output of `pm2 jlist`.

use std::collections::BTreeMap;

use super::FileReader;
use super::draft::{Draft, Log, retries, seconds};
use super::words::{self, QuoteStyle};
use crate::manifest::document::Text;
use crate::manifest::node::{Kind, Node, shorten};
use crate::manifest::tree;
use crate::model::State;

pub fn read(file: &mut FileReader<'_, '_>) -> Vec<Draft> {
    let nodes = match nodes(file) {
        Some(nodes) => nodes,
        None => return Vec::new(),
    };
    let mut apps: Vec<&Node> = Vec::new();
    for node in &nodes {
        match (&node.kind, node.get("apps")) {
            (Kind::Map(entries), Some(list)) => {
                for (key, _) in entries.iter().filter(|(key, _)| key.text() != Some("apps")) {
                    let name = key.text().unwrap_or_default();
                    file.note(key.span.line, name, "configures pm2 itself; ignored");
                }
                match &list.kind {
                    Kind::List(items) => apps.extend(items),
                    _ => apps.push(list),
                }
            }
            (Kind::List(items), _) => apps.extend(items),
            (Kind::Map(_), None) => apps.push(node),
            _ => file.reject(node.span.line, "not a list of apps", "{\"apps\": [{\"name\": …}]}"),
        }
    }
    let mut drafts: Vec<Draft> = Vec::new();
    // `pm2 jlist` lists each instance of an app separately.
    let mut listed: BTreeMap<String, usize> = BTreeMap::new();
    for node in apps {
        let Kind::Map(_) = node.kind else {
            file.reject(
                node.span.line,
                format!("an app must be a map, not {}", node.kind.name()),
                "{\"name\": …}",
            );
            continue;
        };
        let app = App::of(node);
        let name = app.name(file);
        if let Some(at) = listed.get(&name).copied().filter(|_| app.shown) {
            let many = drafts[at].instances.unwrap_or(1) + 1;
            drafts[at].instances = Some(many);
            continue;
        }
        if let Some(draft) = app.draft(name.clone(), file) {
            listed.insert(name, drafts.len());
            drafts.push(draft);
        }
    }
    if drafts.is_empty() && file.reader.problems.is_empty() {
        file.reject(1, "the file has no apps", "{\"apps\": [{\"name\": …, \"script\": …}]}");
    }
    drafts
}

/// The documents of the file, with positions.
fn nodes(file: &mut FileReader<'_, '_>) -> Option<Vec<Node>> {
    let mut nodes = Vec::new();
    let source = file.source;
    for slice in &source.slices {
        match tree::nodes(source, slice, file.reader.limits) {
            Ok(more) => nodes.extend(more),
            Err(fault) => {
                file.reader.problems.push(source.problem(fault));
                return None;
            }
        }
    }
    Some(nodes)
}

struct App<'a> {
    node: &'a Node,
    /// From `pm2 jlist`, which includes runtime state.
    shown: bool,
}

impl<'a> App<'a> {
    fn of(node: &'a Node) -> App<'a> {
        match node.get("pm2_env").filter(|env| matches!(env.kind, Kind::Map(_))) {
            Some(env) => App { node: env, shown: true },
            None => App { node, shown: false },
        }
    }

    /// A setting by any of its names, with its line.
    fn get(&self, names: &[&str]) -> Option<(&'a Node, u32)> {
        let Kind::Map(entries) = &self.node.kind else { return None };
        let is = |key: &Node| key.text().is_some_and(|key| names.contains(&key));
        let found = entries.iter().rev().find(|(key, value)| is(key) && !matches!(value.kind, Kind::Null));
        found.map(|(key, value)| (value, key.span.line))
    }

    fn text(&self, names: &[&str]) -> Option<(String, u32)> {
        let (node, line) = self.get(names)?;
        scalar(node).filter(|text| !text.is_empty()).map(|text| (text, line))
    }

    fn name(&self, file: &mut FileReader<'_, '_>) -> String {
        if let Some((name, _)) = self.text(&["name"]) {
            return name;
        }
        let script = self.text(SCRIPT).map(|(script, _)| script).unwrap_or_default();
        let base = script.rsplit('/').next().unwrap_or_default();
        let stem = base.rsplit_once('.').map_or(base, |(stem, _)| stem).to_owned();
        file.note(
            self.node.span.line,
            "name",
            format!("the app has no name; named {stem:?} after its script"),
        );
        stem
    }

    fn draft(&self, name: String, file: &mut FileReader<'_, '_>) -> Option<Draft> {
        let mut draft = file.draft(self.node.span.line, name);
        self.directory(&mut draft, file);
        self.command(&mut draft, file)?;
        let Kind::Map(entries) = &self.node.kind else { return None };
        for (key, value) in entries {
            let name = key.text().unwrap_or_default();
            if !matches!(value.kind, Kind::Null) {
                self.setting(name, value, key.span.line, &mut draft, file);
            }
        }
        self.output(&mut draft, file);
        Some(draft)
    }

    /// Working directory; the file's own directory if unset.
    fn directory(&self, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let here = file.here.map(words::escaped);
        let cwd = self.text(&["cwd", "pm_cwd"]);
        let line = cwd.as_ref().map_or(self.node.span.line, |(_, line)| *line);
        let cwd = cwd.map(|(path, _)| words::escaped(&path));
        let path = match (cwd, here) {
            (Some(path), _) if path.starts_with('/') => Some(path),
            (Some(path), Some(here)) => Some(words::absolute_path(&path, &here)),
            (None, Some(here)) => Some(here),
            (_, None) => None,
        };
        if path.is_none() {
            file.note(
                line,
                "cwd",
                "relative to the directory where pm2 was started, which is unknown: setup_path is /",
            );
        }
        draft.spec.identity.setup_path = path.map(Text);
    }

    fn command(&self, draft: &mut Draft, file: &mut FileReader<'_, '_>) -> Option<()> {
        let Some((script, line)) = self.text(SCRIPT) else {
            file.reject(self.node.span.line, "the app has no script", "\"script\": \"./server.js\"");
            return None;
        };
        let mut words = Vec::new();
        let interpreter = self.text(&["interpreter", "exec_interpreter"]).map(|(name, _)| name);
        let interpreter = match interpreter.as_deref() {
            Some("none" | "") => None,
            Some(name) => Some(name.to_owned()),
            None => by_extension(&script).map(str::to_owned),
        };
        if let Some(interpreter) = interpreter {
            words.push(interpreter);
            words.extend(self.words(&["interpreter_args", "node_args", "interpreterArgs"], file)?);
        }
        let args = self.words(&["args"], file)?;
        // pm2 passes a `script` with several words to a shell.
        if words.is_empty() && script.contains(char::is_whitespace) {
            let mut command = words::escaped(&script);
            if !args.is_empty() {
                command = format!("{command} {}", words::command(&args));
            }
            let first = script.split_whitespace().next().unwrap_or_default().to_owned();
            draft.spec.identity.proc_name = Some(Text(words::program(&[first])));
            draft.foreground(command);
            file.note(line, "script", "a command line; passed to the shell unchanged");
            return Some(());
        }
        words.push(script);
        words.extend(args);
        draft.spec.identity.proc_name = Some(Text(words::program(&words)));
        draft.foreground(format!("exec {}", words::command(&words)));
        Some(())
    }

    /// Arguments, as a text or as a list.
    fn words(&self, names: &[&str], file: &mut FileReader<'_, '_>) -> Option<Vec<String>> {
        let Some((node, line)) = self.get(names) else { return Some(Vec::new()) };
        let what = names.first().copied().unwrap_or_default();
        let words = match &node.kind {
            Kind::List(items) => {
                items.iter().map(scalar).collect::<Option<Vec<_>>>().ok_or("a word is not text")
            }
            _ => scalar(node)
                .ok_or("the value is not text")
                .and_then(|text| words::split(&text, QuoteStyle::Shlex)),
        };
        match words {
            Ok(words) => Some(words),
            Err(why) => {
                file.reject(line, format!("{what} cannot be read: {why}"), "use text or a list of texts");
                None
            }
        }
    }

    fn setting(&self, key: &str, value: &Node, line: u32, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let is = |yes: bool| matches!(value.kind, Kind::Bool(b) if b == yes);
        match key {
            "env" => self.environment(value, line, draft, file),
            "instances" => instances(value, line, draft, file),
            "exec_mode" => {
                if scalar(value).is_some_and(|mode| mode.starts_with("cluster")) {
                    file.note(
                        line,
                        key,
                        "cluster: instances do not share a port; each needs its own, such as 80${instance}",
                    );
                }
            }
            "autorestart" if is(true) => {}
            "autorestart" => {
                draft.state = State::Unhosted;
                let message = "imported as not supervised (state: unhosted); if it exits, the next apply starts it again";
                file.note(line, key, message);
            }
            "max_restarts" => draft.spec.monitor.start_retries = number(key, value, line, retries, file),
            "restart_delay" => draft.spec.monitor.start_interval = milliseconds(key, value, line, file),
            "min_uptime" => draft.spec.monitor.start_check_secs = milliseconds(key, value, line, file),
            "kill_timeout" => draft.spec.monitor.stop_check_secs = milliseconds(key, value, line, file),
            "user" | "uid" | "username" if !self.shown || key == "user" || key == "uid" => {
                match scalar(value) {
                    Some(user) if user.parse::<u32>().is_ok() => {
                        file.note(line, key, "manifests have user names, not user ids");
                    }
                    Some(user) if !user.is_empty() && !user.contains("${") => {
                        draft.spec.identity.user = Some(Text(user))
                    }
                    Some(_) | None => {}
                }
            }
            "pid_file" | "pid" | "pm_pid_path" => {
                // jlist prints pm2's generated path.
                if let (Some(path), false) = (scalar(value), self.shown) {
                    let folder = draft.spec.identity.setup_path.as_deref().unwrap_or("/").to_owned();
                    draft.spec.identity.pid_path =
                        Some(Text(words::absolute_path(&words::escaped(&path), &folder)));
                }
            }
            "max_memory_restart" => {
                file.note(line, key, "not imported: set limits.memory manually");
            }
            "cron_restart" => file.note(
                line,
                key,
                "scheduled restarts are not supported; auto_type 0 runs a process that exits",
            ),
            "watch" | "watch_delay" | "ignore_watch" if is(false) => {}
            "watch" | "watch_delay" | "ignore_watch" => {
                file.note(line, key, "files are not watched; configmap sets the expected content of a file");
            }
            // Converted elsewhere.
            "name" | "script" | "pm_exec_path" | "args" | "cwd" | "pm_cwd" | "interpreter"
            | "exec_interpreter" | "interpreter_args" | "interpreterArgs" | "node_args" => {}
            key if OUTPUT.contains(&key) => {}
            // Runtime state and internals of pm2.
            _ if self.shown => {}
            key if key.starts_with("env_") => {
                let message = "only env is imported; write a separate manifest for each other environment";
                file.note(line, key, message);
            }
            "merge_logs" | "combine_logs" | "vizion" | "pmx" | "automation" | "treekill" | "time"
                if is(false) => {}
            _ => file.note(line, key, "no equivalent in manifests"),
        }
    }

    fn environment(&self, value: &Node, line: u32, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let Kind::Map(entries) = &value.kind else {
            return file.reject(
                line,
                format!("env must be a map, not {}", value.kind.name()),
                "{\"PORT\": \"8080\"}",
            );
        };
        if self.shown {
            let message = "contains the whole environment of pm2: keep only what the process needs";
            file.note(line, "env", message);
        }
        for (key, value) in entries {
            let name = key.text().unwrap_or_default();
            let odd = name.is_empty() || name.contains(['=', '\0']);
            match scalar(value).filter(|_| !odd) {
                Some(text) => {
                    draft.spec.env.insert(name.to_owned(), words::escaped(&text));
                }
                None if matches!(value.kind, Kind::Null) => {}
                // jlist repeats the app's own settings in env.
                None if self.shown => {}
                None => {
                    let message = format!("ignored: a variable must be text, not {}", value.kind.name());
                    file.note(key.span.line, &format!("env {}", shorten(name)), message);
                }
            }
        }
    }

    /// Sets log_path: manifests have one file for all output.
    fn output(&self, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let all = self.text(&["log_file", "log"]);
        let out = self.text(&["out_file", "output", "out", "out_log", "pm_out_log_path"]);
        let err = self.text(&["error_file", "error", "err_file", "err_log", "pm_err_log_path"]);
        let log = |path: &str| match path {
            "/dev/null" | "NULL" | "false" => Log::Discard,
            path => Log::File(words::escaped(path)),
        };
        let main = all.as_ref().or(out.as_ref()).or(err.as_ref());
        let Some((path, line)) = main else { return };
        draft.log = log(path);
        for (setting, other) in [("out_file", &out), ("error_file", &err)] {
            if let Some((other, at)) = other.as_ref().filter(|(other, at)| other != path || at < line)
                && other != path
            {
                file.note(*at, setting, format!("manifests have one file for all output: {path}"));
            }
        }
    }
}

const SCRIPT: &[&str] = &["script", "pm_exec_path"];

const OUTPUT: [&str; 12] = [
    "log_file",
    "log",
    "out_file",
    "output",
    "out",
    "out_log",
    "pm_out_log_path",
    "error_file",
    "error",
    "err_file",
    "err_log",
    "pm_err_log_path",
];

/// The interpreter that pm2 uses for a script.
fn by_extension(script: &str) -> Option<&'static str> {
    let name = script.rsplit('/').next().unwrap_or_default();
    match name.rsplit_once('.')?.1 {
        "js" | "cjs" | "mjs" => Some("node"),
        "py" => Some("python3"),
        "sh" => Some("bash"),
        "rb" => Some("ruby"),
        "pl" => Some("perl"),
        "php" => Some("php"),
        "ts" => Some("bun"),
        _ => None,
    }
}

fn scalar(node: &Node) -> Option<String> {
    match &node.kind {
        Kind::Text(text) => Some(text.clone()),
        Kind::Int(n) => Some(n.to_string()),
        Kind::Float(x) => Some(x.to_string()),
        Kind::Bool(b) => Some(b.to_string()),
        Kind::Null | Kind::Huge | Kind::List(_) | Kind::Map(_) | Kind::Tagged(_) => None,
    }
}

fn instances(value: &Node, line: u32, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
    let text = scalar(value).unwrap_or_default();
    match text.parse::<i64>() {
        Ok(1) => {}
        Ok(n @ 2..=1_000_000) => {
            draft.instances = u32::try_from(n).ok();
            file.note(line, "instances", "NODE_APP_INSTANCE is not set; ${instance} counts from 1");
        }
        _ if text == "max" || matches!(text.parse::<i64>(), Ok(..=0)) => {
            file.note(
                line,
                "instances",
                format!("{text}: the number of CPUs of a host is unknown; one instance is used"),
            );
        }
        _ => file.reject(line, "instances is not a number of processes", "such as 4"),
    }
}

fn number(
    key: &str,
    value: &Node,
    line: u32,
    fits: fn(i64) -> Option<i64>,
    file: &mut FileReader<'_, '_>,
) -> Option<i64> {
    let Some(n) = scalar(value).and_then(|text| text.parse::<i64>().ok()) else {
        file.reject(line, format!("{key} is not a whole number"), "such as 10");
        return None;
    };
    let fitting = fits(n);
    if fitting.is_none() {
        file.note(line, key, "out of the range of manifests; ignored");
    }
    fitting
}

/// Milliseconds, or a text such as `5s`, as whole seconds.
fn milliseconds(key: &str, value: &Node, line: u32, file: &mut FileReader<'_, '_>) -> Option<i64> {
    let text = scalar(value).unwrap_or_default();
    let ms = match text.parse::<u64>() {
        Ok(ms) => Some(ms),
        Err(_) => super::calendar::span_ms(&text),
    };
    let Some(ms) = ms else {
        file.reject(line, format!("{key} is not a duration"), "use milliseconds, such as 5000");
        return None;
    };
    if ms % 1000 != 0 {
        file.note(line, key, format!("rounded up to {} s", ms.div_ceil(1000)));
    }
    let fitting = i64::try_from(ms.div_ceil(1000)).ok().and_then(seconds);
    if fitting.is_none() {
        file.note(line, key, "longer than manifests allow; ignored");
    }
    fitting
}
