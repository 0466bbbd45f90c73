//! `abide init`: a manifest to start from.

use super::args::Init;
use super::print::Printer;
use super::{Exit, Failure};
use crate::manifest::init;

pub fn run(args: &Init, printer: &Printer) -> Result<Exit, Failure> {
    let here = std::env::current_dir()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot tell the present directory: {error}")))?;
    printer.data(&init::manifest(&args.command, &here));
    if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        printer.remark("to keep it: abide init > FILE.yaml; then: abide validate FILE.yaml");
    }
    Ok(Exit::Done)
}
