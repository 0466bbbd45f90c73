//! systemd import: a `.service` becomes a process, and a `.timer` makes its service periodic.

mod exec;
mod sandbox;
mod service;
mod timer;

pub use self::timer::{Timer, schedule};

use self::service::Service;
use super::draft::Draft;
use super::{FileReader, ini};

pub enum UnitFile {
    Service(Box<Draft>),
    Timer(Timer),
}

pub fn read(file: &mut FileReader<'_, '_>) -> Option<UnitFile> {
    let sections = ini::systemd(file);
    let name = file.base().map(str::to_owned);
    for section in &sections {
        let known = ["Unit", "Service", "Timer", "Install"].contains(&section.name.as_str());
        if !known && !section.name.starts_with("X-") {
            file.note(section.line, &format!("[{}]", section.name), "no equivalent in manifests");
        }
    }
    let section = |name: &str| sections.iter().find(|section| section.name == name);
    match (section("Service"), section("Timer")) {
        (Some(service), _) => Service::new(name, service, section("Unit"))
            .read(file)
            .map(|draft| UnitFile::Service(Box::new(draft))),
        (None, Some(section)) => timer::read(name.unwrap_or_default(), section, file).map(UnitFile::Timer),
        (None, None) => {
            file.reject(
                1,
                "the unit has neither [Service] nor [Timer]",
                "only services and timers can be imported",
            );
            None
        }
    }
}
