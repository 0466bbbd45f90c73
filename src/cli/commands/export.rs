//! `abide export`: manifests of the observed state; a plan of them is empty.

use std::collections::{BTreeSet, HashMap};

use crate::cli::commands::plan::args::SelectArgs;
use crate::cli::commands::status::warn_not_running;
use crate::cli::declared_names::DeclaredNames;
use crate::cli::output::print::{Printer, count, visible};
use crate::cli::target::{LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::manifest::print as manifests;
use crate::model::{Desired, EnvValue, Host, ProcessKey, Spec, State};

/// Print manifests of the observed state
///
/// A plan of these manifests is empty.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub select: SelectArgs,
}

pub fn run(args: &ExportArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(live) = args.target.connect(LocalStart::Never)? else {
        warn_not_running(&args.target, printer)?;
        return Ok(Exit::Done);
    };
    let selection = args.select.selection();
    let (world, declared) = runtime()?.block_on(async {
        let world = live.observe_for(&Desired::default(), Some(BTreeSet::new())).await?;
        Ok::<_, Failure>((world, DeclaredNames::read(&live).await))
    })?;
    let observed = &world.observed;
    let mut kinds: Vec<(ProcessKey, State, &Spec, Vec<Host>)> = Vec::new();
    // Index into `kinds` by process, state and spec.
    let mut indexes: HashMap<(ProcessKey, &str, _), usize> = HashMap::new();
    let mut unknown = 0;
    for (key, seen) in &observed.instances {
        if !selection.selects(key, declared.of(key), &seen.labels) {
            continue;
        }
        let Some(spec) = seen.specs.registered.spec() else {
            unknown += 1;
            continue;
        };
        let ends = spec.monitor.auto_type != crate::model::AutoType::Resident;
        let state = match (seen.running == Some(true) || ends, seen.hosted == Some(true)) {
            (_, true) => State::Running,
            (true, false) if !ends => State::Unhosted,
            _ => State::Stopped,
        };
        let host = world.host(key);
        let next = kinds.len();
        match *indexes.entry((key.process(), state.word(), spec.digest())).or_insert(next) {
            at if at == next => kinds.push((key.process(), state, spec, vec![host])),
            at => kinds[at].3.push(host),
        }
    }
    if unknown > 0 {
        printer
            .warning(&format!("{} not exported: the registered spec is unknown", count(unknown, "instance")));
    }
    let is =
        |secret: fn(&EnvValue) -> bool| kinds.iter().any(|(_, _, spec, _)| spec.env.values().any(secret));
    if is(|value| matches!(value, EnvValue::Secret(_))) {
        printer.warning(
            "this output contains secret values of env in plain text: keep it private, or use {file: PATH}",
        );
    }
    for (key, _, spec, _) in &kinds {
        let names = spec.env.iter().filter(|(_, value)| matches!(value, EnvValue::Digest(_)));
        let names: Vec<String> = names.map(|(name, _)| visible(name)).collect();
        if !names.is_empty() {
            let names = names.join(", ");
            printer.warning(&format!(
                "{}: secret values of env are not exported ({names}): fill in value, or use {{file: PATH}}",
                visible(&key.to_string())
            ));
        }
    }
    let documents: Vec<_> =
        kinds.iter().map(|(key, state, spec, hosts)| manifests::process(key, hosts, *state, spec)).collect();
    printer.data(&manifests::yaml(&documents));
    Ok(Exit::Done)
}
