//! Applies a directory of manifests to the running local system: `cargo run --example apply -- DIRECTORY`.

use std::error::Error;
use std::path::{Path, PathBuf};

use abide::engine::{ApplyRequest, ConnectedTarget, PlanRequest, Report, Unattended, apply};
use abide::manifest::{self, Limits};
use abide::observe::Target;
use abide::reconcile::Rules;

pub async fn apply_directory(directory: PathBuf, home: &Path) -> Result<Report, Box<dyn Error>> {
    let target = ConnectedTarget::local(home)?;
    let source = directory.display().to_string();
    let loaded = manifest::load(&[directory], &Limits::default());
    if loaded.errors() > 0 {
        return Err(format!("invalid manifests: {:#?}", loaded.problems).into());
    }
    let plan = PlanRequest::new(loaded, Rules::new(target.caps()), source);
    Ok(apply(ApplyRequest::new(plan), &target, &mut Unattended).await?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args().nth(1).ok_or("usage: apply DIRECTORY")?;
    let report = apply_directory(directory.into(), Path::new(&std::env::var("ABIDE_HOME")?)).await?;
    report.ended.iter().for_each(|step| println!("{} {}: {}", step.op, step.instance, step.outcome.word()));
    println!("converged: {:?}", report.converged);
    Ok(())
}
