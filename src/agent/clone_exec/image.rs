//! Launch image: the stack of a new process and all data that it reads, in one mapping.
//!
//! The image of a process that the launcher forks has pointers that are valid in the launcher. Its data travels in the request
//! itself, to a mapping that the launcher keeps at a fixed address. The data of a large one is a memory file, which agent
//! and launcher map at the same address. The kernel gives this range of addresses to no other mapping.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::child::{ChildContext, ChildStreams};
use super::{ExecRequest, HELD_FROM, Restrictions, Streams};
use crate::agent::file_limit;
use crate::agent::user_files::ExistingPidFile;

/// Stack size: far more than a child needs. The stack is at the lowest address, so that an overflow faults.
const STACK: usize = 256 << 10;

/// The addresses of shared images. The kernel places programs, libraries, heaps and stacks far above them, with 39-bit
/// addresses too.
const SHARED_FROM: usize = 64 << 30;
const SHARED_SLOTS: usize = 256;
/// The space of one shared image: more than the kernel accepts as arguments and environment.
const SLOT: usize = 64 << 20;

/// The address of images whose data travels in the request: the slot after those of memory files.
const INLINE_AT: usize = SHARED_FROM + SHARED_SLOTS * SLOT;
/// Maximum size of data that travels in the request.
pub const MAX_INLINE: usize = 32 << 10;

const ACCESS: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// The image of one launch.
pub struct Image {
    /// The lowest address of the stack, also where the image has data only.
    start: *mut u8,
    length: usize,
    /// The address of `start` in the process that the image is for.
    target: usize,
    memory: ImageMemory,
}

/// The content of a shared image, as it travels to the launcher.
pub enum ImageContent<'a> {
    File(BorrowedFd<'a>),
    Data(&'a [u8]),
}

/// The memory of an image.
enum ImageMemory {
    Mapping,
    /// A mapping of [`SPARE_LENGTH`] that the next launch of the thread uses again.
    Spare,
    /// A mapping of a memory file.
    File(OwnedFd),
    /// The data without the stack.
    Data(Vec<u64>),
}

impl Image {
    /// The image of a process that shares the agent's memory. `shares_table`: the process begins with the agent's descriptor
    /// table.
    pub fn private(request: &ExecRequest<'_>, shares_table: bool) -> io::Result<Image> {
        Image::build(request, shares_table, Image::map_private)
    }

    /// The image of a process that the launcher forks.
    pub fn shared(request: &ExecRequest<'_>) -> io::Result<Image> {
        Image::build(request, false, Image::shared_memory)
    }

    fn build(
        request: &ExecRequest<'_>,
        shares_table: bool,
        map: fn(usize) -> io::Result<Image>,
    ) -> io::Result<Image> {
        let groups = request.ids.as_ref().map_or(&[][..], |(_, _, groups)| groups);
        let lists = [&request.programs, &request.args, &request.env];
        let pointers: usize = lists.iter().map(|list| list.len() + 1).sum();
        let pid_path = request.pid_file.as_ref().map(|(path, _)| path);
        let texts = lists.into_iter().flatten().chain([&request.folder]).chain(pid_path);
        let bytes: usize = texts.map(|text| text.as_bytes_with_nul().len()).sum();
        let groups_at = STACK + size_of::<ChildContext>();
        let pointers_at = (groups_at + size_of_val(groups)).next_multiple_of(align_of::<*const c_char>());
        let texts_at = pointers_at + pointers * size_of::<*const c_char>();
        let image = map(texts_at + bytes)?;
        let mut writer = Writer { image: &image, pointers_at, texts_at };
        let (programs, args, env) =
            (writer.list(&request.programs), writer.list(&request.args), writer.list(&request.env));
        let Streams { input, output, code } = request.streams;
        let (input, output) = (input.as_raw_fd(), output.as_raw_fd());
        let code = code.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let namespace = request.namespace.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let used = [input, output, code, namespace];
        let above_used = used.into_iter().fold(HELD_FROM, |above, fd| above.max(fd + 1));
        let context = ChildContext {
            programs,
            args,
            env,
            folder: writer.text(&request.folder),
            streams: ChildStreams { input, output, code },
            status: -1,
            copied: if shares_table { above_used } else { -1 },
            ids: request
                .ids
                .as_ref()
                .map(|(user, group, groups)| (*user, *group, image.target(groups_at).cast(), groups.len())),
            restrictions: Restrictions {
                namespace,
                ..request.restrictions.with_file_limit(file_limit::original())
            },
            pid_file: pid_path.map_or(ptr::null(), |path| writer.text(path)),
            existing_pid_file: request
                .pid_file
                .as_ref()
                .map_or(ExistingPidFile::Replace, |(_, existing)| *existing),
            failed: None,
        };
        // SAFETY: both ranges are inside the mapping and aligned, and no other code uses the mapping yet.
        unsafe {
            ptr::copy_nonoverlapping(groups.as_ptr(), image.at(groups_at).cast(), groups.len());
            image.context().write(context);
        }
        Ok(image)
    }

    fn map_private(length: usize) -> io::Result<Image> {
        let is_spare = length <= SPARE_LENGTH;
        if let Some(spare) = SPARE_MAPPING.take().filter(|_| is_spare) {
            let start = ManuallyDrop::new(spare).0;
            return Ok(Image { start, length, target: start as usize, memory: ImageMemory::Spare });
        }
        let (mapped, memory) = match is_spare {
            true => (SPARE_LENGTH, ImageMemory::Spare),
            false => (length, ImageMemory::Mapping),
        };
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: an anonymous mapping at an address of the kernel's choice replaces no other mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), mapped, ACCESS, kind, -1, 0) };
        match start == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(Image { start: start.cast(), length, target: start as usize, memory }),
        }
    }

    fn shared_memory(length: usize) -> io::Result<Image> {
        if length > STACK + MAX_INLINE {
            return Image::map_shared(length);
        }
        let mut data = vec![0u64; (length - STACK).div_ceil(size_of::<u64>())];
        let start = data.as_mut_ptr().cast::<u8>().wrapping_sub(STACK);
        Ok(Image { start, length, target: INLINE_AT, memory: ImageMemory::Data(data) })
    }

    fn map_shared(length: usize) -> io::Result<Image> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        if length > SLOT {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        let file = memfd_create(c"abide-launch", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, length as u64)?;
        let mut failed = None;
        // A slot is in use while another thread launches.
        for _ in 0..SHARED_SLOTS {
            let slot = NEXT.fetch_add(1, Ordering::Relaxed) % SHARED_SLOTS;
            match Image::map_at(SHARED_FROM + slot * SLOT, length, Some(&file), libc::MAP_SHARED) {
                Ok(start) => {
                    let (target, memory) = (start as usize, ImageMemory::File(file));
                    return Ok(Image { start, length, target, memory });
                }
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
    }

    /// Maps the image of another process at the address that it has there. Changes are not shared.
    pub fn receive(file: OwnedFd, address: usize, length: usize) -> io::Result<Image> {
        let range = SHARED_FROM..SHARED_FROM + SHARED_SLOTS * SLOT;
        let has_context = length <= SLOT && length >= STACK + size_of::<ChildContext>();
        if !range.contains(&address) || !address.is_multiple_of(SLOT) || !has_context {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let start = Image::map_at(address, length, Some(&file), libc::MAP_PRIVATE)?;
        Ok(Image { start, length, target: address, memory: ImageMemory::Mapping })
    }

    fn map_at(address: usize, length: usize, file: Option<&OwnedFd>, kind: c_int) -> io::Result<*mut u8> {
        let (wanted, kind) = (address as *mut c_void, kind | libc::MAP_FIXED_NOREPLACE);
        // SAFETY: the mapping replaces no other one: kernels without this flag take the address as a hint.
        unsafe {
            let fd = file.map_or(-1, AsRawFd::as_raw_fd);
            let start = libc::mmap(wanted, length, ACCESS, kind, fd, 0);
            if start == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            if start != wanted {
                libc::munmap(start, length);
                return Err(io::ErrorKind::AddrInUse.into());
            }
            Ok(start.cast())
        }
    }

    /// The shared image: its address in the launcher, its length, and its memory file or data; `None`: it is private.
    pub fn share(&self) -> Option<(usize, usize, ImageContent<'_>)> {
        let shared = match &self.memory {
            ImageMemory::Mapping | ImageMemory::Spare => return None,
            ImageMemory::File(file) => ImageContent::File(file.as_fd()),
            ImageMemory::Data(data) => {
                // SAFETY: the vector has at least this length, and bytes have no invalid values.
                let data = unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), self.length - STACK) };
                ImageContent::Data(data)
            }
        };
        Some((self.target, self.length, shared))
    }

    /// The address of an offset in the process that the image is for.
    fn target(&self, offset: usize) -> *const u8 {
        (self.target + offset) as *const u8
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }

    /// The context, right above the stack. The stack size is a multiple of every alignment.
    pub fn context(&self) -> *mut ChildContext {
        self.at(STACK).cast()
    }

    /// Lowest address and size of the stack.
    pub fn stack(&self) -> (*mut c_void, usize) {
        (self.start.cast(), STACK)
    }

    /// The failed step that a process reported in this memory.
    pub fn failed(&self) -> Option<(super::ExecStage, i32)> {
        // SAFETY: initialized in `of`. The process that may have changed it has called `execve` or is gone.
        unsafe { (*self.context()).failed }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        match self.memory {
            ImageMemory::Data(_) => {}
            ImageMemory::Spare => {
                // The environment may contain secrets.
                // SAFETY: the range is inside the mapping, which a vfork child no longer uses.
                unsafe { ptr::write_bytes(self.at(STACK), 0, self.length - STACK) };
                SPARE_MAPPING.set(Some(SpareMapping(self.start)));
            }
            // SAFETY: this value owns the mapping. A forked process has a copy; a vfork child was waited for.
            ImageMemory::Mapping | ImageMemory::File(_) => unsafe {
                libc::munmap(self.start.cast(), self.length);
            },
        }
    }
}

/// A private mapping for the next launch of this thread: the kernel interrupts every thread of the agent to unmap one.
struct SpareMapping(*mut u8);

thread_local! {
    static SPARE_MAPPING: Cell<Option<SpareMapping>> = const { Cell::new(None) };
}

/// The length of a spare mapping: enough for the arguments and the environment of most launches.
const SPARE_LENGTH: usize = STACK + MAX_INLINE;

impl Drop for SpareMapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping.
        unsafe {
            libc::munmap(self.0.cast(), SPARE_LENGTH);
        }
    }
}

/// The launcher's mapping for images whose data travels in the request.
pub struct InlineImage(ManuallyDrop<Image>);

impl InlineImage {
    /// Maps the fixed address.
    pub fn map() -> io::Result<InlineImage> {
        let (length, kind) = (STACK + MAX_INLINE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let start = Image::map_at(INLINE_AT, length, None, kind)?;
        let image = Image { start, length, target: INLINE_AT, memory: ImageMemory::Mapping };
        Ok(InlineImage(ManuallyDrop::new(image)))
    }

    /// The place of the data.
    pub fn data(&mut self) -> &mut [u8] {
        // SAFETY: the range is inside the mapping, which is never unmapped; bytes have no invalid values.
        unsafe { std::slice::from_raw_parts_mut(self.0.at(STACK), MAX_INLINE) }
    }

    /// The image of received data. An error: it is not the data of one.
    pub fn image(&self, address: usize, length: usize, received: usize) -> io::Result<&Image> {
        let is_complete = length >= STACK + size_of::<ChildContext>() && received == length - STACK;
        match address == INLINE_AT && is_complete {
            true => Ok(&self.0),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

/// Writes strings and lists into the image. `Image::of` has computed the space.
struct Writer<'a> {
    image: &'a Image,
    pointers_at: usize,
    texts_at: usize,
}

impl Writer<'_> {
    /// The list ends with a null pointer.
    fn list(&mut self, texts: &[CString]) -> *const *const c_char {
        let at = self.pointers_at;
        let list = self.image.at(at).cast::<*const c_char>();
        let pointers: Vec<*const c_char> =
            texts.iter().map(|text| self.text(text)).chain([ptr::null()]).collect();
        // SAFETY: the range is inside the mapping and aligned.
        unsafe { ptr::copy_nonoverlapping(pointers.as_ptr(), list, pointers.len()) };
        self.pointers_at += size_of_val(pointers.as_slice());
        self.image.target(at).cast()
    }

    fn text(&mut self, text: &CStr) -> *const c_char {
        let bytes = text.to_bytes_with_nul();
        let at = self.texts_at;
        // SAFETY: the range is inside the image.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.image.at(at), bytes.len()) };
        self.texts_at += bytes.len();
        self.image.target(at).cast()
    }
}
