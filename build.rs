//! Generates the C header from the entry points, and sets the linker's options for the shared library.
//!
//! The header goes to `OUT_DIR`; `scripts/header.sh` copies it to `include/`, and a test compares
//! the two.

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::path::Path;

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

    // cbindgen follows the modules that `src/lib.rs` declares.
    let bindings = cbindgen::Builder::new()
        .with_config(config())
        .with_src("src/lib.rs")
        .generate()?;
    bindings.write_to_file(header);
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
            exclude: vec!["CUstream_st".into()],
            // Constants are not part of the interface.
            item_types: vec![
                cbindgen::ItemType::Structs,
                cbindgen::ItemType::OpaqueItems,
                cbindgen::ItemType::Functions,
            ],
            rename: HashMap::from([("CUstream_st".into(), "struct CUstream_st".into())]),
            ..Default::default()
        },
        ..Default::default()
    }
}
