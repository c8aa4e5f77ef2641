// Makes the client from proto/allspark.proto. Needs protoc.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    tonic_build::configure()
        .build_server(false)
        .compile(&["../../../proto/allspark.proto"], &["../../../proto"])?;
    Ok(())
}
