//! Makes the C header from the entry points, and sets how the shared library is linked.
//!
//! The header goes to `OUT_DIR`; `scripts/header.sh` copies it to `include/`, and a test compares
//! the two.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::{env, fs};

/// A stream's handle in the header.
const STREAM: &str = "struct CUstream_st *";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=src/entry");
    println!("cargo::rerun-if-changed=src/lib.rs");

    // Thread-local destructors, exit handlers and the process's signal handler point into the
    // library, so it stays once it is loaded.
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");

    let header = Path::new(&env::var("OUT_DIR")?).join("concertina.h");
    println!(
        "cargo::rustc-env=CONCERTINA_GENERATED_HEADER={}",
        header.display()
    );

    // What `src/lib.rs` declares as its modules is found from there.
    let bindings = cbindgen::Builder::new()
        .with_config(config())
        .with_src("src/lib.rs")
        .generate()?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    // The space that a renamed pointer type leaves before its argument's name.
    let text = String::from_utf8(text)?.replace(&format!("{STREAM} "), STREAM);
    fs::write(header, text)?;
    Ok(())
}

fn config() -> cbindgen::Config {
    cbindgen::Config {
        language: cbindgen::Language::C,
        header: Some(
            "/* concertina: a CUDA memory allocator. Made from src/entry by scripts/header.sh. */"
                .into(),
        ),
        include_guard: Some("CONCERTINA_H".into()),
        cpp_compat: true,
        no_includes: true,
        sys_includes: vec!["stddef.h".into()],
        usize_is_size_t: true,
        documentation_style: cbindgen::DocumentationStyle::Doxy,
        style: cbindgen::Style::Tag,
        line_length: 100,
        // A stream appears as CUDA declares it, without the name that its headers give it: C99 does
        // not let a program that includes both define the name twice.
        after_includes: Some(
            "\n/** A CUDA stream, as in `cudaStream_t` and `CUstream`. */\nstruct CUstream_st;"
                .into(),
        ),
        export: cbindgen::ExportConfig {
            exclude: vec!["cudaStream_t".into(), "CUstream_st".into()],
            rename: HashMap::from([("cudaStream_t".into(), STREAM.into())]),
            ..Default::default()
        },
        ..Default::default()
    }
}
