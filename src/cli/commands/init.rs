//! `abide init`: a commented starter manifest.

use crate::cli::args::InitArgs;
use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};
use crate::manifest::{self, Limits, init};

pub fn run(args: &InitArgs, printer: &Printer) -> Result<Exit, Failure> {
    let here = std::env::current_dir()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot read the current directory: {error}")))?;
    let options = init::InitOptions { namespace: args.namespace.clone(), name: args.name.clone() };
    let Some(text) = init::manifest(&args.command, &here, &options) else {
        let message = format!("{:?} is not the name of a program", args.command[0]);
        return Err(Failure::new(Exit::Usage, message).hint("such as `abide init -- ./api --port 8080`"));
    };
    let checked = manifest::load_text("the manifest", text.clone(), &Limits::default());
    if let Some(problem) = checked.problems.first() {
        let message = format!("cannot write a manifest for this command: {}", problem.message);
        return Err(Failure::new(Exit::Usage, message));
    }
    printer.data(&text);
    if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        printer.info("save it with `abide init > FILE.yaml`, then run `abide validate FILE.yaml`");
    }
    Ok(Exit::Done)
}
