# Completion for fish: copy to ~/.config/fish/completions. It asks fastports itself.
function __fastports_options
    begin
        fastports (commandline -opc)[2] --help 2>/dev/null
        test (commandline -opc)[2] = run; and fastports help supervise
    end | string match -rga '(?:^  |, )(--[a-z_-]+)'
end
complete -c fastports -n __fish_is_first_token -f -a "(fastports --help | string match -rg '^  ([a-z]{2,})  ')"
complete -c fastports -n 'not __fish_is_first_token; and not contains -- -- (commandline -opc)' -a '(__fastports_options)'
