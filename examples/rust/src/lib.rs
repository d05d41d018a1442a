//! libtcomp for Rust: models and sessions that free what they hold. No crates are needed.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

#[repr(C)]
struct RawModel(c_void);
#[repr(C)]
struct RawSession(c_void);

extern "C" {
    fn tcomp_model_load(path: *const c_char, threads: c_int, flags: c_int, model: *mut *mut RawModel, why: *mut c_char, capacity: usize) -> c_int;
    fn tcomp_model_free(model: *mut RawModel);
    fn tcomp_model_count(model: *const RawModel, kind: c_int) -> c_int;
    fn tcomp_model_name(model: *const RawModel, kind: c_int, number: c_int) -> *const c_char;
    fn tcomp_model_type(model: *const RawModel, kind: c_int, number: c_int) -> *const c_char;
    fn tcomp_model_rank(model: *const RawModel, kind: c_int, number: c_int) -> c_int;
    fn tcomp_model_extent(model: *const RawModel, kind: c_int, number: c_int, axis: c_int) -> i64;
    fn tcomp_session_new(model: *mut RawModel, session: *mut *mut RawSession, why: *mut c_char, capacity: usize) -> c_int;
    fn tcomp_session_free(session: *mut RawSession);
    fn tcomp_session_set_input(session: *mut RawSession, number: c_int, data: *const c_void, shape: *const i64, rank: c_int) -> c_int;
    fn tcomp_session_run(session: *mut RawSession) -> c_int;
    fn tcomp_session_output(session: *const RawSession, number: c_int) -> *const c_void;
    fn tcomp_session_output_bytes(session: *const RawSession, number: c_int) -> usize;
    fn tcomp_session_message(session: *const RawSession) -> *const c_char;
}

const MESSAGE: usize = 512;
const BAD_ARGUMENT: c_int = 8;

/// What libtcomp refused: its code, and why.
#[derive(Debug)]
pub struct Error {
    pub code: i32,
    pub why: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Error {}

fn text(p: *const c_char) -> String {
    if p.is_null() { String::new() } else { unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned() }
}

/// An element type of Rust that tensors have.
pub trait Element: Copy {
    const NAME: &'static str;
}
impl Element for f32 { const NAME: &'static str = "float32"; }
impl Element for f64 { const NAME: &'static str = "float64"; }
impl Element for i32 { const NAME: &'static str = "int32"; }
impl Element for i64 { const NAME: &'static str = "int64"; }
impl Element for u8 { const NAME: &'static str = "uint8"; }

#[derive(Clone, Copy)]
pub enum Kind {
    Input = 0,
    Output = 1,
}

struct Loaded(*mut RawModel);
unsafe impl Send for Loaded {} // a model is immutable
unsafe impl Sync for Loaded {}
impl Drop for Loaded {
    fn drop(&mut self) {
        unsafe { tcomp_model_free(self.0) }
    }
}

/// A model, which any number of threads may use.
#[derive(Clone)]
pub struct Model(Arc<Loaded>);

impl Model {
    /// # Safety
    /// A model is native code, which this loads; and nobody may change the file in place meanwhile.
    pub unsafe fn load(path: &str, threads: i32) -> Result<Model, Error> {
        let path = CString::new(path).map_err(|_| Error { code: BAD_ARGUMENT, why: "the path has a NUL".into() })?;
        let (mut model, mut why) = (std::ptr::null_mut(), [0 as c_char; MESSAGE]);
        match tcomp_model_load(path.as_ptr(), threads, 0, &mut model, why.as_mut_ptr(), MESSAGE) {
            0 => Ok(Model(Arc::new(Loaded(model)))),
            code => Err(Error { code, why: text(why.as_ptr()) }),
        }
    }

    pub fn count(&self, kind: Kind) -> usize {
        unsafe { tcomp_model_count(self.0 .0, kind as c_int) as usize }
    }

    pub fn name(&self, kind: Kind, number: usize) -> String {
        text(unsafe { tcomp_model_name(self.0 .0, kind as c_int, number as c_int) })
    }

    pub fn element_type(&self, kind: Kind, number: usize) -> String {
        text(unsafe { tcomp_model_type(self.0 .0, kind as c_int, number as c_int) })
    }

    /// The extents, None where they are free.
    pub fn shape(&self, kind: Kind, number: usize) -> Vec<Option<usize>> {
        let (model, kind, number) = (self.0 .0, kind as c_int, number as c_int);
        let extent = |axis| usize::try_from(unsafe { tcomp_model_extent(model, kind, number, axis) }).ok();
        (0..unsafe { tcomp_model_rank(model, kind, number) }).map(extent).collect()
    }
}

/// What runs a model, one run at a time. Inputs are borrowed for as long as it lives.
pub struct Session<'a> {
    session: *mut RawSession,
    model: Model,
    inputs: PhantomData<&'a [u8]>,
}

unsafe impl Send for Session<'_> {}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        unsafe { tcomp_session_free(self.session) }
    }
}

impl<'a> Session<'a> {
    pub fn new(model: &Model) -> Result<Session<'a>, Error> {
        let (mut session, mut why) = (std::ptr::null_mut(), [0 as c_char; MESSAGE]);
        match unsafe { tcomp_session_new(model.0 .0, &mut session, why.as_mut_ptr(), MESSAGE) } {
            0 => Ok(Session { session, model: model.clone(), inputs: PhantomData }),
            code => Err(Error { code, why: text(why.as_ptr()) }),
        }
    }

    fn check(&self, code: c_int) -> Result<(), Error> {
        if code == 0 { Ok(()) } else { Err(Error { code, why: text(unsafe { tcomp_session_message(self.session) }) }) }
    }

    pub fn set_input<T: Element>(&mut self, number: usize, values: &'a [T], shape: &[usize]) -> Result<(), Error> {
        let refuse = |why: &str| Err(Error { code: BAD_ARGUMENT, why: why.into() });
        if self.model.element_type(Kind::Input, number) != T::NAME {
            return refuse("the values are of another type than the input, or there is no such input");
        }
        if shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent)) != Some(values.len()) {
            return refuse("there are not as many values as the shape says");
        }
        let extents: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect();
        self.check(unsafe { tcomp_session_set_input(self.session, number as c_int, values.as_ptr().cast(), extents.as_ptr(), extents.len() as c_int) })
    }

    pub fn run(&mut self) -> Result<(), Error> {
        self.check(unsafe { tcomp_session_run(self.session) })
    }

    /// An output of the last run; None if there was none, or the type is another one.
    pub fn output<T: Element>(&self, number: usize) -> Option<&[T]> {
        let data: *const T = unsafe { tcomp_session_output(self.session, number as c_int) }.cast();
        if data.is_null() || self.model.element_type(Kind::Output, number) != T::NAME {
            return None;
        }
        let bytes = unsafe { tcomp_session_output_bytes(self.session, number as c_int) };
        Some(unsafe { std::slice::from_raw_parts(data, bytes / std::mem::size_of::<T>()) })
    }
}
