//! Compiles libtcomp by the system's C compiler.

use std::path::PathBuf;
use std::process::Command;
use std::env;

fn run(command: &mut Command) {
    let status = command.status().expect("there is no C compiler");
    assert!(status.success(), "{command:?} failed");
}

fn main() {
    let include = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../tcomp/runtime/include");
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    let object = out.join("libtcomp.o");
    run(Command::new("cc").args(["-std=c99", "-O2", "-fPIC", "-c"]).arg(include.join("libtcomp.c")).arg("-o").arg(&object));
    run(Command::new("ar").arg("crs").arg(out.join("liblibtcomp.a")).arg(&object));
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=libtcomp");
    println!("cargo:rustc-link-lib=dl");
    println!("cargo:rerun-if-changed={}", include.join("libtcomp.c").display());
}
