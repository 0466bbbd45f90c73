//! Applies a directory of manifests to the running local system: `cargo run --example apply -- DIRECTORY`.

use std::error::Error;
use std::path::{Path, PathBuf};

use abide::engine::{self, ApplyRequest, ConnectedTarget, PlanRequest, Report, Unattended};
use abide::{manifest, observe::Target, reconcile::Rules, source};

pub async fn apply_directory(directory: PathBuf, home: &Path) -> Result<Report, Box<dyn Error>> {
    let (target, shown) = (ConnectedTarget::local(home)?, directory.display().to_string());
    let mut loaded = manifest::load(&[directory], &manifest::Limits::default());
    if loaded.errors() > 0 {
        return Err(format!("invalid manifests: {:#?}", loaded.problems).into());
    }
    // Processes without a user run as the current one.
    let user = nix::unistd::User::from_uid(nix::unistd::geteuid())?.ok_or("the current user has no name")?;
    source::set_default_user(&mut loaded.desired, &user.name);
    let plan = PlanRequest::new(loaded, Rules::new(target.caps()), shown);
    Ok(engine::apply(ApplyRequest::new(plan), &target, &mut Unattended).await?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args().nth(1).ok_or("usage: apply DIRECTORY")?;
    let report = apply_directory(directory.into(), Path::new(&std::env::var("ABIDE_HOME")?)).await?;
    report.ended.iter().for_each(|one| println!("{} {}: {}", one.op, one.instance, one.outcome.word()));
    println!("converged: {:?}", report.converged);
    Ok(())
}
